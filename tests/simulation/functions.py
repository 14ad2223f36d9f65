"""Training functions in virtual time: the executor, the run's rounds and checkpoints, the replica and the session are real.

The simulation replaces what waits in real time: the executor's thread, the thread that stores checkpoints, and the
signals that stop a function. The function reports its steps. The user reads the rounds while it runs."""

from __future__ import annotations

import os
import queue
import random
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from greenlet import getcurrent

from raysgd import train
from raysgd.core.decisions.policy import PLANNED, Recovery
from raysgd.engine.engine import Engine
from raysgd.errors import ResourceError, WorkerStartError
from raysgd.torch.group import function_backend as torch_function
from raysgd.train import Checkpoint, CheckpointConfig, TrainingWorkerError, replica, sessions
from raysgd.train.backends import Backend, BackendConfig
from raysgd.train.run import driver, rounds, worker_group
from raysgd.train.run.checkpoint_manager import CheckpointManager
from raysgd.train.run.executor import BackendExecutor
from raysgd.workers.events import MessageReceived
from tests.simulation.checker import Checker, Violation
from tests.simulation.faults import Cancelled, Schedule
from tests.simulation.group import Large, Node, SimGroup, Worker
from tests.simulation.network import Link, NetworkError, SimBackend
from tests.simulation.plan import ON_NODES, ON_WORKERS, Fault, Plan
from tests.simulation.replica import UserError
from tests.simulation.world import Process, Wake, World

__all__ = ["FunctionPlan", "FunctionResult", "function_plan_for", "run_function"]

MEMORY = (
    "/dev/shm" if os.path.isdir("/dev/shm") else None
)  # where checkpoints are written, because syncing to disks takes long
LOOK_S = 0.5  # how often a user looks for a round
SAVES = ("with", "rank 0", "apart", "after", "none")
IN_FUNCTION = ("compute", "report", "report", "reported", "reported", "message", "return", "setup hook")
SAVING = ("save", "saved")
FORMING = ("leave", "offer", "join", "formed", "state", "load", "join ended", "process start", "hook", "warm ended")
ON_DRIVER = ("cancel", "pause", "jump")
PHASES = ("train", "train", "recovery", "change", "growth", "agreement", "rendezvous")


@dataclass(frozen=True, repr=False)
class FunctionPlan(Plan):
    """A run of a function that reports `steps` steps, on the machines and with the faults of a `Plan`.

    saves    how it saves: "with" the report, with that of "rank 0" only, "apart" before the report, "after" it, "none"
    every    after how many steps it saves
    keeps    how many checkpoints are kept in storage
    read_s   how long the user takes for each round
    store_s  how long storing takes for each checkpoint
    in_step  whether the ranks wait for each other in each step, in a collective call
    """

    steps: int = 6
    saves: str = "with"
    every: int = 1
    keeps: int | None = 2
    read_s: float = 0.01
    store_s: float = 0.01
    in_step: bool = True

    def saved(self, step: int) -> bool:
        return self.saves != "none" and (step + 1) % self.every == 0


@dataclass
class FunctionResult:
    """The result of a run. `seen` are the generation and the step of each round, in the order in which the user got them."""

    plan: FunctionPlan
    error: BaseException | None = None
    trace: list[str] = field(default_factory=list)
    seen: list[tuple[int, int]] = field(default_factory=list)
    struck: Counter[tuple[str, str]] = field(default_factory=Counter)
    recoveries: list[Any] = field(default_factory=list)


@dataclass
class Attempt:
    """What the ranks of one generation did: where they began, and their last steps, by rank, in reports and in saves: those
    that were begun, and those that have returned."""

    size: int
    resumed: int
    begun: dict[tuple[str, int], int] = field(default_factory=dict)
    done: dict[tuple[str, int], int] = field(default_factory=dict)

    def by_all(self, of: dict[tuple[str, int], int], what: str) -> int:
        """Return the last step that all ranks have reached."""
        return min(of.get((what, rank), self.resumed) for rank in range(self.size))

    def by_any(self, of: dict[tuple[str, int], int], what: str) -> int:
        """Return the last step that any rank has reached."""
        return max(of.get((what, rank), self.resumed) for rank in range(self.size))


class FunctionChecker(Checker):
    """Sees what each rank has reported, and compares it with what the user gets. The generations and recoveries are checked as
    for operators.

    `saved_at_least` and `saved_at_most` are the step of the checkpoint from which the next attempt may begin."""

    def __init__(self, plan: FunctionPlan) -> None:
        super().__init__(plan)
        self.plan = plan
        self.begin_run(-1)

    def begin_run(self, resumed: int) -> None:
        """Note that a run begins, from the checkpoint of this step."""
        self.attempts: dict[int, Attempt] = {}
        self.seen: list[tuple[int, int]] = []
        self.saved_at_least = self.saved_at_most = self.resumed = resumed

    # -- the function ---------------------------------------------------------------------------------

    def begins(self, worker: Worker, rank: int, size: int, resumed: int) -> Attempt:
        """Check from which checkpoint a rank begins. Return its attempt."""
        generation = worker.client.generation
        if worker.lost or worker.given_up:
            return Attempt(size, resumed)  # no caller waits for it any more
        if generation not in self.attempts:
            for number in sorted(self.attempts)[-1:]:
                self._settle(self.attempts[number])
            if not self.saved_at_least <= resumed <= self.saved_at_most:
                self.fail(
                    f"generation {generation} begins from the checkpoint of step {resumed}, and the save of {self.saved_at_least} "
                    f"had returned, that of {self.saved_at_most} was the newest that may count"
                )
            self.attempts[generation] = Attempt(size, resumed)
            self.saved_at_least = self.saved_at_most = resumed
        attempt = self.attempts[generation]
        if (attempt.size, attempt.resumed) != (size, resumed):
            self.fail(f"rank {rank} of {size} begins after step {resumed}, and others as {attempt}")
        return attempt

    def _settle(self, attempt: Attempt) -> None:
        """Note which checkpoints of an attempt that has ended may count: those that all ranks have begun to make. Those count
        with which one rank was done."""
        self.saved_at_least = max(self.saved_at_least, attempt.by_any(attempt.done, "save"))
        self.saved_at_most = max(self.saved_at_most, attempt.by_all(attempt.begun, "save"))

    def returns(self, worker: Worker, attempt: Attempt, what: str, manager: CheckpointManager) -> None:
        """Check, when a report or a save returns on a rank, that all have made it, and that its checkpoint is stored."""
        rank, at = train.world_rank(), manager.latest_id
        if worker.lost or worker.given_up:
            return  # no caller waits for it any more
        step = attempt.done[what, rank] = attempt.begun[what, rank]
        if attempt.by_all(attempt.begun, what) < step:
            self.fail(f"the {what} of step {step} returned on rank {rank}, and others had not made it: {attempt.begun}")
        stored = [each.number for each in manager.stored]
        if what == "save" and self.plan.keeps != 0 and at not in stored:
            self.fail(f"the save of step {step} returned on rank {rank}, and of {at} checkpoints, {stored} were stored")

    # -- the user -------------------------------------------------------------------------------------

    def sees(self, rows: list[dict[str, Any]]) -> None:
        """Check a round that the user gets."""
        found = [(row["generation"], row["step"], row["rank"], row["size"]) for row in rows]
        generation, step, _, size = found[0]
        if found != [(generation, step, rank, size) for rank in range(size)]:
            self.fail(f"a round of the steps, ranks and sizes {found}")
        count = [row["_training_iteration"] for row in rows]
        if set(count) != {len(self.seen) + 1}:
            self.fail(f"round {len(self.seen) + 1} is the function's round {count}")
        before = self.seen[-1] if self.seen else (0, 0)
        resumed = self.attempts[generation].resumed
        expected = before[1] + 1 if generation == before[0] else resumed + 1
        if step != expected or generation < before[0]:
            self.fail(
                f"after {self.seen[-3:]} (generation, step), the user sees step {step} of generation {generation}"
            )
        self.seen.append((generation, step))

    def ended(self) -> None:
        """Check, when a run has ended, that the user has seen each round of which a report has returned."""
        super().ended()
        seen = set(self.seen)
        for generation, attempt in self.attempts.items():
            for step in range(attempt.resumed + 1, attempt.by_any(attempt.done, "report") + 1):
                if (generation, step) not in seen:
                    self.fail(
                        f"the report of step {step} of generation {generation} has returned, and is not in {self.seen}"
                    )

    def returned_from_run(self, values: list[Any]) -> None:
        """Check the results of a run that raised no error."""
        generation, last = max(self.attempts), self.plan.steps - 1
        size = self.attempts[generation].size
        if values != [(generation, rank, size) for rank in range(size)]:
            self.fail(f"the run returned {values}, and generation {generation} has {size} ranks")
        steps = [step for _, step in self.seen]
        if (
            self.plan.saves in ("with", "rank 0")
            and self.plan.every == 1
            and steps != [*range(self.resumed + 1, last + 1)]
        ):
            self.fail(f"a function that saves with each report reported the steps {steps}")

    def stored(self, kept: dict[int, int], newest: int) -> None:
        """Check the steps of the checkpoints in storage, by number, and of the one that the driver gives to functions."""
        made = [step for step in range(self.resumed + 1, newest + 1) if self.plan.saved(step)]
        keeps = len(made) if self.plan.keeps is None else self.plan.keeps
        expected = dict([*enumerate(made, 1)][max(len(made) - keeps, 0) :])
        if kept != expected:
            self.fail(f"the checkpoints {kept} are kept, by number and step, and should be {expected}")

    def leaves_too_late(self, worker: Any, announced_at: float) -> None:
        """Check nothing: when a function can stop depends on when it saves."""


class Main:
    """The main thread of one worker process, on which the function runs. A signal interrupts what it waits for, and so does
    what a connection of its own brings."""

    def __init__(self, worker: Worker, group: SimGroup) -> None:
        self.worker, self._group = worker, group
        self.handler: Callable[[int, Any], None] = lambda signum, frame: None
        self.sessions: list[Any] = []
        self.prepared_for = -1  # the generation for which the backend's hook has run here
        self._wake: Wake | None = None
        link = partial(Link, worker.world, group.network, worker.node.name, late=group.plan.late)
        self._reports, self._answers = link(0.2), link(0.005)  # checkpoints take their time

    def sleep(self, seconds: float) -> None:
        over: list[bool] = []
        self.worker.at(seconds, lambda: self._end(over))
        self._wait(over)

    def deliver(self, message: Any, body: Any) -> None:
        """Send a report, and wait until the driver has acknowledged it. What was sent arrives although its process ends."""
        over: list[bool] = []

        def arrive() -> None:
            if not (self.worker.lost or self.worker.given_up):  # the driver has closed the connection
                self._group.emit(MessageReceived(self.worker.name, message, bytes(body), acknowledge))

        def acknowledge() -> None:
            self._answers.send(lambda: self.worker.at(0.0, lambda: self._end(over)))

        self._reports.send(arrive)
        self._wait(over)

    def signal(self, signum: int) -> None:
        if not self.worker.alive:
            self.worker.world.hub.switch()  # does not return: the thread that sends signals has ended with its process
        if self._wake is not None:
            self._wake(signum)

    def _end(self, over: list[bool]) -> None:
        over.append(True)
        if self._wake is not None:
            self._wake()

    def _wait(self, over: list[bool]) -> None:
        while not over:
            self._wake = Wake(self.worker)
            signum = self._wake.wait()
            self._wake = None
            if signum is not None:
                self.handler(signum, None)


class Storage:
    """A replacement for `BackgroundWriter`, which takes its time."""

    def __init__(self, world: World, slowest_s: float, fail: Callable[[BaseException], None]) -> None:
        self._world, self._slowest_s, self._fail = world, slowest_s, fail
        self._work: list[Callable[[], None]] = []
        self.error: BaseException | None = None

    def put(self, work: Callable[[], None], *, stores: bool) -> None:
        self._work.append(work)
        if len(self._work) == 1:
            self._begin()

    def check_time(self) -> None:
        """Storage is late, but never too late."""

    def finish(self) -> BaseException | None:
        self._world.run(1e6, lambda: not self._work)
        return self.error

    def _begin(self) -> None:
        self._world.at(self._world.between(0.0, self._slowest_s), self._do)

    def _do(self) -> None:
        try:
            if self.error is None:
                self._work[0]()
        except Exception as error:
            self.error = error
            self._fail(error)
        del self._work[0]
        if self._work:
            self._begin()


class Queue:
    """A replacement for `queue.SimpleQueue`, whose `get` does not wait. `found` is whether the last look found something."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self.found = False

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self, timeout: float) -> Any:
        self.found = bool(self._items)
        if not self.found:
            raise queue.Empty
        return self._items.popleft()


class NotYet(Exception):
    """Ends a look of the user for the next round, because there is none yet."""


class Config(BackendConfig):
    """The user's backend, whose processes are connected by the simulation."""

    def __init__(self, connect: Callable[[], SimBackend], hooks: type[Backend]) -> None:
        self._connect, self._hooks = connect, hooks

    def make_backend(self, **given: Any) -> SimBackend:
        return self._connect()

    @property
    def backend_cls(self) -> type[Backend]:
        return self._hooks


class FunctionScript:
    """Runs the user's script: start the workers, run the function, read its rounds, and begin again after an error."""

    def __init__(self, plan: FunctionPlan, world: World, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.plan, self.world, self.folder = plan, world, folder
        self.checker = checker = FunctionChecker(plan)
        self.schedule = schedule = Schedule(world, plan, checker)
        self.group = schedule.group = SimGroup(world, plan, checker, schedule)
        for number, (when, slots) in enumerate(plan.later):
            world.at(when, partial(self.group.nodes.append, Node(f"later{number}", slots)))
            schedule.over_at = max(schedule.over_at, world.now + when)
        self.mains: dict[Any, Main] = {}
        self._senders = Process(world)  # the threads that send signals
        self._thread: Any = None
        self._queue = Queue()
        self._ended = False
        self._patch_worker(patch)
        self._patch_driver(patch)

        limits = {"join_s": plan.limits.join_s, "collective_s": plan.limits.collective_s}
        connect = partial(SimBackend, world, self.group.network, in_place=plan.in_place, shares=plan.shares, **limits)
        self.executor = BackendExecutor(
            Config(connect, self._hooks()),
            plan.ranks,
            max_retries=plan.retries,
            elastic=plan.elastic,
        )

    # -- what is replaced -----------------------------------------------------------------------------

    def _patch_worker(self, patch: pytest.MonkeyPatch) -> None:
        def thread(target: Callable[[], None], **_: Any) -> Any:
            return SimpleNamespace(start=partial(self._senders.spawn, target))

        patch.setattr(
            replica,
            "threading",
            SimpleNamespace(get_ident=self._main, current_thread=int, main_thread=int, Thread=thread),
        )
        patch.setattr(replica, "time", SimpleNamespace(sleep=self._senders.sleep))
        signals = SimpleNamespace(
            signal=lambda signum, handler: setattr(self._main(), "handler", handler),
            pthread_kill=lambda main, signum: main.signal(signum),
        )
        patch.setattr(replica, "signal", signals)
        patch.setattr(sessions, "_running", _Sessions(self._main))

        def share(make: Callable[[], bytes], giver: int, control: Any) -> Any:
            return self._main().worker.share(make, giver)

        patch.setattr(torch_function, "share_bytes", share)

    def _patch_driver(self, patch: pytest.MonkeyPatch) -> None:
        def engine(*given: Any, **settings: Any) -> Engine:
            world, schedule = self.world, self.schedule
            seams: dict[str, Any] = {"clock": world.clock, "jitter": world.random.random, "during": schedule.during}
            on_recovery = settings.pop("on_recovery")

            def recovered(recovery: Recovery) -> None:
                on_recovery(recovery)
                self.checker.recovered(recovery)

            schedule.watch(made := Engine(*given, **settings, **seams, on_recovery=recovered))
            return made

        def thread(target: Callable[[], None], **_: Any) -> Any:
            self._thread = SimpleNamespace(start=lambda: None, run=target, is_alive=lambda: False)
            return self._thread

        def new_queue() -> Queue:
            self._queue = Queue()
            return self._queue

        patch.setattr(driver, "Engine", engine)
        patch.setattr(driver, "Blob", Large)
        for each in (driver, worker_group):
            patch.setattr(each, "pack", lambda value: value)
        patch.setattr(driver, "RayGroup", lambda *_, **__: self.group)
        patch.setattr(driver, "ensure_cluster", lambda *_: None)
        patch.setattr(driver, "driver_address", lambda: "driver")
        patch.setattr(driver, "limits_for", lambda **_: self.plan.limits)
        patch.setattr(driver, "threading", SimpleNamespace(Thread=thread, current_thread=int))
        patch.setattr(rounds, "queue", SimpleNamespace(SimpleQueue=new_queue, Empty=queue.Empty))
        patch.setattr(rounds, "BackgroundWriter", partial(Storage, self.world, self.plan.store_s))

    def _main(self) -> Main:
        """Return the main thread of the worker whose code runs now."""
        return self.mains[getcurrent()]

    # -- the user's code in the workers ---------------------------------------------------------------

    def _hook(self) -> None:
        worker = self.group.current[getcurrent()]
        main = self.mains[getcurrent()] = Main(worker, self.group)
        worker.client.control.deliver = main.deliver
        worker.point("hook")

    def _hooks(self) -> type[Backend]:
        """Return the user's backend, which prepares the workers of each generation."""

        def prepare() -> None:
            main = self._main()
            main.worker.point("setup hook")
            main.prepared_for = main.worker.client.generation

        class Hooks(Backend):
            def on_start(self, worker_group: Any, backend_config: Any) -> None:
                worker_group.execute(prepare)

        return Hooks

    def _function(self) -> tuple[int, int, int]:
        """Be the user's training function."""
        main, plan = self._main(), self.plan
        worker, rank, size = main.worker, train.world_rank(), train.world_size()
        generation = worker.client.generation
        if main.prepared_for != generation:
            self.checker.fail(
                f"{worker.name} begins in generation {generation}, and was prepared for {main.prepared_for}"
            )
        found = train.load_checkpoint()
        resumed = -1 if found is None else found["step"]
        attempt = self.checker.begins(worker, rank, size, resumed)
        for step in range(resumed + 1, plan.steps):
            main.sleep(self.world.between(0.5, 1.5) * plan.step_s * worker.slow)
            worker.point("compute")
            if plan.in_step:
                self._collective(worker)
            if plan.saves == "apart" and plan.saved(step):
                self._save(worker, attempt, step)
            self._report(worker, attempt, {"generation": generation, "step": step, "rank": rank, "size": size})
            if plan.saves == "after" and plan.saved(step):
                self._save(worker, attempt, step)
        worker.point("return")
        return generation, rank, size

    def _collective(self, worker: Worker) -> None:
        group = worker.backend.group
        if group is None:
            raise NetworkError("the process group was aborted")
        group.collective(worker, None, worker.backend.collective_s)

    def _report(self, worker: Worker, attempt: Attempt, row: dict[str, int]) -> None:
        step, rank = row["step"], row["rank"]
        with_report = self.plan.saves in ("with", "rank 0") and self.plan.saved(step)
        mine = with_report and (self.plan.saves == "with" or rank == 0)
        worker.point("report")
        for what in ("report", "save") if with_report else ("report",):
            attempt.begun[what, rank] = step
        train.report(row, checkpoint=Checkpoint.from_dict({"step": step}) if mine else None)
        for what in ("report", "save") if with_report else ("report",):
            self._returns(worker, attempt, what)
        worker.point("reported")

    def _save(self, worker: Worker, attempt: Attempt, step: int) -> None:
        rank = train.world_rank()
        worker.point("save")
        attempt.begun["save", rank] = step
        train.save_checkpoint(step=step)
        self._returns(worker, attempt, "save")
        worker.point("saved")

    def _returns(self, worker: Worker, attempt: Attempt, what: str) -> None:
        manager = self.executor.checkpoint_manager
        assert manager is not None
        self.checker.returns(worker, attempt, what, manager)

    # -- the script -----------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self.executor.start(self._hook)
        except (ResourceError, WorkerStartError, UserError, Cancelled, TrainingWorkerError):
            if not self.schedule.struck:
                raise
            return
        for number in range(4):
            if self._run_once(number):
                break
        self.schedule.begin_call()
        with self.schedule.during("shutdown"):
            self.executor.shutdown()
        left = lambda: [worker.name for worker in self.group.workers.values() if worker.alive]  # noqa: E731
        self.world.run(max(self.schedule.over_at - self.world.now, 0.0) + 5.0, lambda: not left())
        self.checker.raise_found()
        if left():
            raise Violation(f"processes are left after shutdown: {left()}")

    def _run_once(self, number: int) -> bool:
        """Run the function from the newest checkpoint of the run before. Return whether it has returned."""
        checkpoint = self.executor.latest_checkpoint
        self.checker.begin_run(-1 if checkpoint is None else checkpoint["step"])
        plan, recoveries, directory = self.plan, len(self.executor.recoveries), self.folder / str(number)
        self.schedule.begin_call(2 * plan.steps * (10 * plan.step_s + plan.read_s + plan.store_s) + 20.0)
        self.world.note("SCRIPT run %d", number)
        self.executor.start_training(self._function, directory, checkpoint, CheckpointConfig(num_to_keep=plan.keeps))
        self._ended = False
        self.world.at(plan.read_s, self._read)
        with self.schedule.during("train"):
            self._thread.run()
        while not self._ended:
            self._look()
        returned = self._check_end(recoveries)
        self._check_storage(directory)
        self.checker.ended()
        return returned

    def _check_end(self, recoveries: int) -> bool:
        """Check how a run ended. Return whether the function has returned."""
        error: Exception | None = None
        try:
            values = self.executor.finish_training()
        except (UserError, Cancelled, TrainingWorkerError) as raised:
            error = raised
        self.checker.raise_found()
        failures = sum(each.reason not in PLANNED for each in self.executor.recoveries[recoveries:])
        if isinstance(error, UserError):
            self.checker.raised(error)
        elif isinstance(error, TrainingWorkerError):
            self.checker.gave_up(failures)
        elif error is None:
            self.checker.returned()
            self.checker.survived(failures)
            self.checker.returned_from_run(values)
        return error is None

    def _read(self) -> None:
        """Be the user's thread, which reads a round and takes its time for it."""
        if not self._ended:
            found = self._look()
            self.world.at(self.plan.read_s if found else LOOK_S, self._read)

    def _look(self) -> bool:
        """Look for the next round. Return whether there was one."""

        def give_up() -> None:
            if not self._queue.found:
                raise NotYet

        try:
            result = self.executor.fetch_next_round(give_up)
        except NotYet:
            return False
        except BaseException:  # finish_training() raises it again
            result = None
        if result is None:
            self._ended = True
            return False
        self.checker.sees(result.rows)
        return True

    def _check_storage(self, directory: Path) -> None:
        newest = self.executor.latest_checkpoint
        folder = directory / "checkpoints"
        files = sorted(folder.iterdir()) if folder.exists() else []
        kept = {int(file.name.removeprefix("checkpoint_")): Checkpoint(file).to_dict()["step"] for file in files}
        self.checker.stored(kept, -1 if newest is None else newest["step"])


class _Sessions:
    """The sessions of the functions that run, of which each simulated process has its own."""

    def __init__(self, main: Callable[[], Main]) -> None:
        self._main = main

    def append(self, session: Any) -> None:
        self._main().sessions.append(session)

    def remove(self, session: Any) -> None:
        self._main().sessions.remove(session)

    def __len__(self) -> int:
        return len(self._main().sessions)

    def __getitem__(self, index: int) -> Any:
        return self._main().sessions[index]


def run_function(plan: FunctionPlan, *, tracing: bool = False) -> FunctionResult:
    """Run a plan."""
    world = World(plan.seed, tracing=tracing)
    result = FunctionResult(plan, trace=world.trace)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        script = FunctionScript(plan, world, Path(folder), patch)
        try:
            script.run()
        except (Exception, KeyboardInterrupt, Violation) as error:
            result.error = error
        finally:
            if script.checker.engine is not None:
                Engine.living.discard(script.checker.engine)
            world.close()
    result.seen, result.struck = script.checker.seen, script.schedule.struck
    result.recoveries = script.checker.engine.recoveries if script.checker.engine is not None else []
    return result


def function_plan_for(seed: int) -> FunctionPlan:
    """Draw a plan. Most have few ranks and few faults."""
    draw = random.Random(f"function {seed}")
    ranks, spare = draw.choice([1, 2, 2, 2, 3, 3, 4, 6]), draw.choice([1, 1, 2])
    saves = draw.choice(SAVES)
    places = (*IN_FUNCTION, *(SAVING * 2 if saves in ("apart", "after") else ()))
    return FunctionPlan(
        seed=seed,
        ranks=ranks,
        nodes=draw.choice([(ranks,), (ranks, spare), (1,) * (ranks + spare)]),
        step_s=draw.choice([0.01, 0.05, 0.3]),
        late=draw.choice([0.01, 0.1, 0.1]),
        in_place=draw.random() < 0.85,
        min_workers=draw.choice([1, 1, ranks]),
        grow=draw.choice([True, True, False]),
        retries=draw.choice([-1, -1, -1, -1, -1, 0, 1]),
        faults=tuple(_fault(draw, places) for _ in range(draw.choice([0, 1, 1, 2, 2, 3, 4, 6]))),
        steps=draw.randint(2, 12),
        shares=seed % 2 == 0,
        saves=saves,
        every=draw.choice([1, 1, 2, 3]),
        keeps=draw.choice([None, 0, 1, 2]),
        read_s=draw.choice([0.001, 0.05, 0.5, 15.0]),
        store_s=draw.choice([0.001, 0.1, 3.0, 15.0]),
        in_step=draw.random() < 0.5,
    )


def _fault(draw: random.Random, places: Sequence[str]) -> Fault:
    kind = draw.choice(draw.choice([ON_WORKERS, ON_WORKERS, ("kill",), ("kill",), ON_NODES, ("raise",), ON_DRIVER]))
    if kind == "raise":
        at = draw.choice([each for each in places if each not in ("message", "setup hook")])
    elif kind in ON_DRIVER or draw.random() < 0.2:
        at = f"in {draw.choice(PHASES)}"
    else:
        at = draw.choice(draw.choice([places, places, places, places, FORMING]))
    return Fault(
        kind=kind,
        at=at,
        count=draw.randint(1, 4) if at not in places or at in ("return", "setup hook") else draw.randint(1, 20),
        others=draw.choice([0, 0, 0, 0, 1, 16]),
        pick=draw.randrange(64),
        seconds=draw.choice([0.05, 1.0, 4.0, 8.0, 25.0]),
    )
