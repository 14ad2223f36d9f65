"""One simulated run: the script that a user would have written, and the checks of what its calls return."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from raysgd.constants import NUM_SAMPLES
from raysgd.core.decisions.policy import PLANNED, Recovery
from raysgd.core.measures import metrics
from raysgd.core.protocols import Call
from raysgd.core.snapshot import Ask, Snapshot
from raysgd.engine.call import Job
from raysgd.engine.engine import Engine
from raysgd.errors import CheckpointError, DivergenceError, ResourceError, TrainingFailedError, WorkerStartError
from raysgd.trainer.within_call import Contents, WithinCall
from raysgd.trainer.within_call import Schedule as Due
from tests.simulation.checker import Checker, Violation
from tests.simulation.faults import Cancelled, Schedule
from tests.simulation.group import Large, Node, SimGroup
from tests.simulation.network import SimBackend
from tests.simulation.plan import Plan
from tests.simulation.replica import SimReplica, Step, UserError, steps_of, value_of
from tests.simulation.world import World

__all__ = ["Result", "run"]

# Calls that a failure does not end, however many there are.
HARDY = ("resize", "idle")
CTRL_C_S = 8.0  # 5 s for the workers to stop, and for those that had been dismissed to leave their places


@dataclass
class Result:
    """The result of a run. `struck` counts faults by kind and the driver's phase."""

    plan: Plan
    error: BaseException | None = None
    trace: list[str] = field(default_factory=list)
    steps: int = 0
    redone: int = 0
    slowest_s: float = 0.0
    struck: Counter[tuple[str, str]] = field(default_factory=Counter)
    recoveries: list[Recovery] = field(default_factory=list)


class Script:
    """Runs the user's script, and checks its results."""

    _loads = 0  # the number of the newest load
    _recoveries = 0  # before the running call
    _part: WithinCall | None = None  # of a call in which checkpoints are made
    _writing: tuple[Any, Contents, int] | None = None

    def __init__(self, plan: Plan, world: World) -> None:
        self.plan, self.world = plan, world
        self.checker = checker = Checker(plan)
        self.schedule = schedule = Schedule(world, plan, checker)
        self.group = schedule.group = SimGroup(world, plan, checker, schedule)
        for number, (when, slots) in enumerate(plan.later):
            node = Node(f"later{number}", slots)
            world.at(when, lambda node=node: self.group.nodes.append(node))
            schedule.over_at = max(schedule.over_at, world.now + when)
        self.engine = self._new_engine(plan.ranks)
        schedule.watch(self.engine)
        self._saved: tuple[bytes, list[Step]] | None = None

    def _new_engine(self, target: int) -> Engine:
        plan, world, schedule = self.plan, self.world, self.schedule
        limits = {"join_s": plan.limits.join_s, "collective_s": plan.limits.collective_s}
        self.backend = SimBackend(world, self.group.network, in_place=plan.in_place, shares=plan.shares, **limits)
        return Engine(
            self.group,
            self.backend,
            self._build,
            hook=self._hook,
            notice=SimReplica.notice_preemption,
            target=target,
            elastic=plan.elastic,
            limits=plan.limits,
            clock=world.clock,
            jitter=world.random.random,
            on_progress=schedule.on_progress,
            on_recovery=self.checker.recovered,
            during=schedule.during,
        )

    # -- the user's code in the workers ---------------------------------------------------------------

    def _hook(self) -> None:
        self.group.current[self.world.current()].point("hook")

    def _build(self, rank_info: Any, control: Any) -> SimReplica:
        worker = self.group.current[self.world.current()]
        worker.compute()
        worker.point("setup")
        worker.replica = SimReplica(worker, self.plan, rank_info, control)
        return worker.replica

    # -- the script -----------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._start()
        except (ResourceError, WorkerStartError, UserError, KeyboardInterrupt, Cancelled):
            if not self.schedule.struck:
                raise
        else:
            for line in self.plan.script:
                self._until_done(*line.split())
        self._shut_down()

    def _start(self) -> None:
        """Start the workers. A fault before the first generation may end this with an error."""
        try:
            self.engine.start()
        except UserError as error:
            self.checker.raised(error)
            raise

    def _shut_down(self) -> None:
        self.schedule.begin_call()
        with self.schedule.during("shutdown"):
            while True:
                try:
                    self.engine.stop()
                    break
                except (KeyboardInterrupt, Cancelled):
                    self.world.note("SCRIPT shutdown was interrupted")
        alive = lambda: [worker.name for worker in self.group.workers.values() if worker.alive]  # noqa: E731
        wait_s = max(self.schedule.over_at - self.world.now, 0.0) + 5.0  # a machine may still be out of reach
        self.group.wait(wait_s, lambda: not alive())
        self.checker.raise_found()
        if alive():
            raise Violation(f"processes are left after stop: {alive()}")

    def _until_done(self, name: str, *given: str) -> None:
        """Make a call of the script. If an error of the user's code or Ctrl-C ends it, make it again."""
        while True:
            self.world.note("SCRIPT %s %s", name, given)
            self.schedule.begin_call()
            self._recoveries = len(self.engine.recoveries)
            try:
                with self.schedule.during("train" if name == "fit" else name):
                    getattr(self, f"_{name}")(*map(int, given))
                self.checker.raise_found()
                self.checker.returned()
                self.checker.survived(self._failures() if name not in HARDY else 0)
                return
            except UserError as error:
                self.checker.raise_found()
                self.checker.raised(error)
            except Cancelled:
                pass
            except KeyboardInterrupt:
                took_s = self.world.now - max(self.schedule.interrupted_at, self.schedule.over_at)
                if took_s > CTRL_C_S:
                    raise Violation(f"{name} ended {took_s:.1f} s after Ctrl-C") from None
            except DivergenceError:
                raise
            except TrainingFailedError:
                self.checker.raise_found()
                self.checker.gave_up(self._failures())
            except (ResourceError, WorkerStartError):
                if name != "resize" or not self.schedule.struck:
                    raise
                return  # the machines that it asked for were not there in time
            self.world.note("SCRIPT an error was raised")
            self.checker.ended()

    def _failures(self) -> int:
        return sum(each.reason not in PLANNED for each in self.engine.recoveries[self._recoveries :])

    # -- its calls ------------------------------------------------------------------------------------

    def _train(self, num_steps: int | None = None, **job: Any) -> None:
        checker, calm = self.checker, self.schedule.calm
        self.schedule.begin_call(2 * self.plan.step_s * (num_steps or self.plan.samples))
        call = Call(SimReplica.train, {"num_steps": num_steps})
        compare = Call(SimReplica.sum_weights) if self.plan.compare else None
        parts = self._run_job(
            Job(call, again="resume", redo=True, max_failures=self.plan.retries, compare=compare, **job)
        )
        truth, members = checker.truth, [self.group.workers[name] for name in self.engine._table.members()]
        assert members[0].replica is not None
        weights = checker.weights(members[0].replica.initial)
        for worker in members:
            replica = worker.replica
            assert replica is not None
            if replica.steps != truth or replica.weights != weights:
                raise Violation(
                    f"after train(), {worker.name} has {len(replica.steps)} steps, and an undisturbed run {len(truth)}"
                )
        if self.engine.calls.progress.step != len(truth):
            raise Violation(f"after train(), the driver counts {self.engine.calls.progress.step} steps of {len(truth)}")
        checker.trained(members)
        steps, number = checker.steps_of_call(self.engine.calls.trained), self.engine.calls.trained
        checker.has_trained(number, num_steps, all_calls=self._keeps_a_snapshot())
        self._check_metrics([part.values for part in parts], steps, exact=calm and checker.measures_all)

    def _keeps_a_snapshot(self) -> bool:
        """Return whether no recovery has begun without a snapshot."""
        return self.plan.snapshot_every is not None and all(
            each.in_place or each.batches_redone < each.step for each in self.engine.recoveries
        )

    def _check_metrics(self, parts: Sequence[Sequence[Any]], steps: Sequence[Any], *, exact: bool) -> None:
        """Check the result of a call. If no worker has failed in it, it equals that of an undisturbed run."""
        result = metrics.merge_call(parts)
        used = [value_of(sample) for step in steps for sample in range(step.start, step.stop)]
        committed = max(value.committed for values in parts for value in values)
        if committed != len(used):
            raise Violation(f"train() reports {committed} committed samples, and {len(used)} were used")
        samples, mean = result.get(NUM_SAMPLES, 0), sum(used) / len(used)
        if samples > len(used) or (exact and samples != len(used)):
            raise Violation(f"train() reports {samples} samples, and {len(used)} were used")
        if exact and not math.isclose(result["value"], mean):
            raise Violation(f"train() reports the mean {result['value']}, and an undisturbed run {mean}")

    def _fit(self, every: int) -> None:
        """Train an epoch, in which each checkpoint that is due is made between two batches, as automatic checkpoints are."""
        schedule = Due(every, self.world.clock, step=self.engine.calls.progress.step)

        def start(contents: Contents) -> dict[str, Any] | None:
            self._note_written()
            if self._writing is not None:
                return None
            transfer = self.group.transfer()
            self._writing = transfer, contents, every
            return {"transfer": transfer.name}

        def prepare() -> dict[str, Any]:
            self._end_part()
            before = [part.values for part in self.engine.calls.measured]
            step, ranks = self.engine.calls.progress.step, self.engine.world_size
            self._part = WithinCall(schedule, start, self._raise, step=step, ranks=ranks, before=before)
            transfer = self.group.transfer()
            transfer.answer = self._part.answer
            return {"asks": {"transfer": transfer.name, "step": self._part.first}}

        try:
            self._train(prepare=prepare)
        finally:
            self._end_part()

    def _end_part(self) -> None:
        if self._part is not None:
            self._part.end()
        if self._writing is not None and not self._writing[0].opened:
            self._writing[0].close()

    def _raise(self, error: BaseException) -> None:
        raise error

    def _note_written(self) -> None:
        """Note the checkpoint that was being written, if that has ended."""
        if self._writing is None:
            return
        transfer, contents, every = self._writing
        if transfer.data is not None and contents.is_complete:
            self._writing, steps = None, steps_of(transfer.data)
            self.checker.saved_within(steps, contents, every)
            self._saved = transfer.data, steps
        elif transfer.closed:
            self._writing = None

    def _validate(self) -> None:
        self._call(SimReplica.validate, {"call": self.engine.calls._number})

    def _apply(self) -> None:
        ran = self._call(SimReplica.apply, {"number": self.engine.calls._number}, again="keep")
        if len(ran) != len(set(ran)) or not ran:
            raise Violation(f"a function's results are those of {ran}")

    def _call(self, method: Callable[..., Any], arguments: dict[str, Any], again: Any = "repeat", **job: Any) -> Any:
        return self._run_job(Job(Call(method, arguments), again=again, max_failures=self.plan.retries, **job))[
            -1
        ].values

    def _run_job(self, job: Job) -> Any:
        return self.engine.calls.run(job)

    def _save(self) -> None:
        self._writing = None
        data = [value for value in self._call(SimReplica.checkpoint, {}) if value is not None]
        self._saved = data[0], steps_of(data[0])
        self.checker.saved(self._saved[1])

    def _load(self, refuses: int = -1) -> None:
        """Load what was saved. If a rank `refuses` it, no call but a load is accepted."""
        self._note_written()
        if self._saved is None:
            return
        data, steps = self._saved
        loads = self._loads = max(self._loads, self.engine.calls.progress.loads) + 1
        try:
            with self.engine.calls.state_replaced_by_hand(loads):
                if refuses < 0:
                    self.checker.loaded(steps, loads)
                given = {"data": Large(data), "loads": loads, "refuses": refuses}
                values = self._call(SimReplica.restore, given, replaces=True)
                if any(values):
                    raise CheckpointError("a rank refuses")
        except CheckpointError:
            if refuses < 0:
                raise
            if not self.engine.calls.progress.undefined:
                raise Violation("a rank has refused a state, and the trainer has one") from None
            with suppress(CheckpointError):
                self._validate()
                raise Violation("a call was accepted in an undefined state") from None
            self._recoveries = len(self.engine.recoveries)  # the next load is a call of its own
            self._load()
            return
        if refuses >= 0:
            raise Violation("all ranks have loaded a state that one of them has refused")
        self.engine.calls.keep_load(
            Snapshot(progress=self.engine.calls.progress, call=-1, load=partial(self._load_again, given))
        )
        newest = self.engine._table.snapshots.latest()
        self.checker.has_loaded(len(steps), shown=newest is not None and newest.progress.loads == loads)

    def _load_again(self, given: dict[str, Any], ask: Ask) -> bool:
        values = ask(Call(SimReplica.restore, given))
        if values is not None and any(values):
            raise Violation("a rank refuses a state that it has loaded")
        return values is not None

    def _resize(self, count: int) -> None:
        before = self.engine.target
        try:
            self.engine.resize(count)
        except BaseException:
            if self.engine.target not in (before, self.engine.world_size):
                raise Violation(
                    f"after an error in resize({count}), there should be {self.engine.target}, and {before} before"
                ) from None
            raise
        if not self.engine.world_size <= count == self.engine.target:
            raise Violation(f"resize({count}) returned with {self.engine.world_size} workers")

    def _idle(self) -> None:
        for _ in range(4):
            self.schedule.driver_waits()
            self.group.wait(2.0, lambda: False)


def run(plan: Plan, *, tracing: bool = False) -> Result:
    """Run a plan."""
    if plan.orphan_s:
        from tests.simulation.drivers import run_named

        return run_named(plan, tracing=tracing)
    world = World(plan.seed, tracing=tracing)
    script, result = Script(plan, world), Result(plan, trace=world.trace)
    try:
        script.run()
    except (Exception, KeyboardInterrupt, Violation) as error:
        result.error = error
    finally:
        Engine.living.discard(script.engine)  # a broken engine would count as one that holds resources
        world.close()
    checker, schedule = script.checker, script.schedule
    result.steps, result.redone = checker.applied_steps, checker.redone
    result.struck, result.slowest_s = schedule.struck, schedule.slowest_s
    result.recoveries = script.engine.recoveries
    return result
