"""Check what must hold at every moment of a simulated run, whatever fails."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from raysgd.constants import NUM_SAMPLES
from raysgd.core.channel.messages import Interrupt
from raysgd.core.decisions.policy import PLANNED, Recovery
from raysgd.core.outcomes import WorkerFailed
from raysgd.trainer.within_call import Contents
from tests.simulation.network import ProcessGroup
from tests.simulation.replica import Step, UserError, weights_after

__all__ = ["Checker", "Violation"]


class Violation(BaseException):
    """The engine broke one of its guarantees. This is not an Exception, which a worker would report as the user's
    own."""


class Checker:
    """Sees what the driver cannot see: each applied step, each generation, each state that a worker loads.

    truth       the steps that are applied in the weights with which training continues
    newest      the generation of the last group that has formed
    discarded   the most steps of a healthy worker that the driver has dismissed since the last group began to train
    least       the steps in the state that the user has loaded, if the driver has a snapshot of it
    told        the workers that were told of their preemption
    gpus        how often each GPU has failed, by its node and number, as workers have told their driver
    """

    def __init__(self, plan: Any) -> None:
        self._plan = plan
        self.schedule: Any = None
        self.engine: Any = None
        self.truth: list[Step] = []
        self.newest = 0
        self.loads = 0
        self.applied_steps = 0
        self.told: set[Any] = set()
        self.redone = 0
        self.least = 0
        self.gpus: Counter[tuple[str, str]] = Counter()
        self._found: Violation | None = None
        self._beyond: dict[str, list[Step]] = {}  # what workers have applied that their driver had given up
        self._short = False  # whether there are fewer workers than training needs
        self._began: dict[int, int] = {}
        self._discarded: list[tuple[str, int]] = []
        self._outdated: set[str] = set()  # the workers with a state of a training that was given up
        self._members: Sequence[Any] = ()
        self._trained: dict[int, int | None] = {}
        self._called: set[tuple[str, int, int]] = set()
        self._thrown: dict[int, tuple[UserError, Any, int]] = {}

    def fail(self, text: str) -> None:
        """Raise a violation. It may be raised in a worker, whose code could catch it, so the driver raises it too."""
        self._found = self._found or Violation(text)
        raise self._found

    def raise_found(self) -> None:
        if self._found is not None:
            raise self._found

    # -- generations ----------------------------------------------------------------------------------

    def formed(self, worker: Any, group: ProcessGroup) -> None:
        if group.generation < self.newest:
            self.fail(f"{worker.name} joined generation {group.generation}, but {self.newest} was formed already")
        if group.generation == self.newest and group.members != self._members:
            self.fail(f"generation {group.generation} was formed twice, with different members")
        self.newest, self._members = group.generation, group.members
        if not 1 <= len(group.members) <= self._plan.ranks:
            self.fail(f"a group has {len(group.members)} members, and at most {self._plan.ranks} are wanted")

    def received(self, worker: Any, message: Any, *, interrupted: bool) -> None:
        """Check that a message about an old generation does not interrupt a worker."""
        if interrupted and isinstance(message, Interrupt) and message.generation < worker.client.generation:
            self.fail(f"{worker.name}, in generation {worker.client.generation}, obeyed {message}")

    def recovered(self, recovery: Recovery) -> None:
        members = self.engine.world_size
        if recovery.world_size_after != members:
            self.fail(f"{recovery} names {recovery.world_size_after} workers, and there are {members}")
        stopped = "suspend" in {kind for kind, _ in self.schedule.struck}  # then its workers had left their group
        if recovery.reason not in PLANNED and self.schedule.calm and not (stopped and recovery.reason == "network"):
            self.fail(f"{recovery.reason} in phase '{self.schedule.phase}', although no fault can be its cause")
        if recovery.reason == "preemption" and not self.schedule.announced:
            self.fail(f"{recovery}, although no machine was to be stopped")
        least = min(self._plan.min_workers, self.engine.target)
        self._short = recovery.reason not in PLANNED and members < least  # then the call ends with an error

    def gpu_failed(self, worker: Any, outcome: WorkerFailed) -> None:
        """Note that a worker has reported a broken GPU."""
        if outcome.fault is not None:
            self.gpus[worker.node.name, worker.gpu] += 1

    def is_set_up(self, worker: Any) -> None:
        """Check that no worker is set up on a GPU that has failed twice."""
        if self.gpus[worker.node.name, worker.gpu] >= 2:
            self.fail(f"{worker.name} is set up on GPU {worker.gpu} of {worker.node.name}, which has failed twice")

    # -- drivers --------------------------------------------------------------------------------------

    def acts(self, group: Any) -> None:
        """Check that a driver that starts a call, or starts or ends a process, is the newest one."""
        if group.keeper is not None and group.term != group.keeper.term:
            self.fail(f"the driver of term {group.term} acts in term {group.keeper.term}")

    def granted(self, driver: Any, drivers: Sequence[Any]) -> None:
        """Check that a driver that becomes one takes over from none that lives."""
        for other in drivers:
            lives = other is not driver and other.group.term and other.running and not other.group.superseded
            if lives and other.resumed_at <= self.schedule.now - 5.0:
                self.fail(f"term {driver.group.term} begins, and the driver of term {other.group.term} lives")
        before = max(drivers, key=lambda each: each.group.term if each is not driver else -1)
        since = max(driver.began_at, driver.resumed_at, before.died_at or math.inf)
        if self.schedule.calm and self.schedule.now > since + 6.0 and self.holders(driver.group):
            self.fail(f"term {driver.group.term} begins {self.schedule.now - since:.1f} s after the last one has ended")
        if self.truth and not self.holders(driver.group):
            self.state_is_lost()
        self._short = False  # its call has ended with it

    def holders(self, group: Any) -> list[str]:
        """Return the workers that have the state of the training."""
        have = [w for w in group.workers.values() if w.alive and w.replica is not None and w.host.holds_state]
        here = [w for w in have if w.replica.loads == self.loads]
        return [w.name for w in here if w.replica.steps == self.truth or self._is_beyond(w.name, w.replica.steps)]

    def _is_beyond(self, name: str, steps: Sequence[Step]) -> bool:
        return steps == self._beyond.get(name) and steps[: len(self.truth)] == self.truth

    def state_is_lost(self) -> None:
        """Note that no process has the state of the training any more."""
        self._discarded, self.least = [], 0
        self.schedule.disturbed(0.0, harmful=True)

    def begins_again(self, group: Any) -> None:
        """Note that a script begins with the first line. Workers that it cannot reach keep the training before."""
        self._outdated |= {worker.name for worker in group.workers.values() if worker.replica is not None}
        self.redone += len(self.truth)
        self.truth, self.loads, self.least, self._discarded, self._trained = [], 0, 0, [], {}
        self._beyond = {}

    def orphan_ends(self, worker: Any) -> None:
        if worker.group.stopped_at() is not None:  # its driver will find that it has failed
            self.schedule.disturbed(0.0, harmful=True)
        if self._plan.orphan_s and worker.host.holds_state:
            since = worker.client.driver.since
            if since is None or worker.clock() < since + self._plan.orphan_s:
                self.fail(f"{worker.name} ends itself too early")
            self.schedule.disturbed(0.0, harmful=True)  # what it had measured is lost
            if self.holders(worker.group) in ([], [worker.name]):
                self.state_is_lost()

    def adopted(self, worker: Any) -> None:
        if worker.term > worker.group.keeper.term:
            self.fail(f"{worker.name} is adopted in term {worker.term}, which was never granted")

    # -- preemption -----------------------------------------------------------------------------------

    def told_of_preemption(self, worker: Any, deadline_s: float | None) -> None:
        if (worker.name, worker.term) in self.told:
            self.fail(f"{worker.name} was told of its preemption twice")
        if not (worker.client.control.notice if deadline_s is None else worker.node.draining):
            self.fail(f"{worker.name} was told that it is stopped in {deadline_s} s, which is not true")
        self.told |= {worker.name, (worker.name, worker.term)}

    def leaves_too_late(self, worker: Any, announced_at: float) -> None:
        """Check that a member whose machine is stopped now, which was announced, could not have left before."""
        trained = self.schedule.phase == "train" and self.schedule.call_began <= announced_at
        trained = trained and not {"die", "suspend", "abandon"} & {kind for kind, _ in self.schedule.struck}
        if trained and self.schedule.calm and worker in self._members:
            self.fail(f"{worker.name} was still a member when its machine was stopped, which was announced")

    def trained(self, members: Sequence[Any]) -> None:
        """Check, after a call that trained, those of the members that were announced to leave before it."""
        began = self.schedule.call_began
        for worker in members:
            if worker.announced_at is not None and worker.announced_at < began - 1.0 and self.schedule.calm:
                if worker.name not in self.told:
                    self.fail(f"{worker.name} was not told of its preemption")
                if worker.leave_by < began - 1.0:
                    self.fail(f"{worker.name} is still a member shortly before its machine is stopped")

    # -- steps ----------------------------------------------------------------------------------------

    def applied(self, worker: Any, group: ProcessGroup, steps: Sequence[Step], contributions: Sequence[Any]) -> None:
        """`worker` has applied a step, the last of `steps`. `contributions` has what each rank contributed to its
        all-reduce."""
        self._check_step(contributions, steps[-1])
        self._check_order(steps)
        alone = all(each.lost for each in group.members)  # the driver may still get a snapshot from them
        if worker.given_up or (worker.lost and not alone):
            # The driver ended it between the all-reduce and its step, and the others continued without it. Or it could not end
            # it, and the next one may find it.
            if worker.name not in self._outdated:
                self._beyond[worker.name] = list(steps)
            return
        if self._short:
            self.fail(
                f"training continues with {len(group.members)} workers, and at least {self._plan.min_workers} are wanted"
            )
        if group.generation < self.newest:
            self.fail(f"{worker.name} trained in generation {group.generation}, but {self.newest} has formed")
        if group.generation not in self._began:
            if not self._plan.in_place:
                # All are new, from a snapshot that may be that of a worker whose connection was lost.
                self._continue_from(steps[:-1])
            self._begin(group, len(steps) - 1)
        number = len(steps)
        if number == len(self.truth) + 1 and list(steps[:-1]) == self.truth:
            self.truth.append(steps[-1])
            self.applied_steps += 1
        elif list(steps) != self.truth[:number]:
            self.fail(
                f"{worker.name} applied step {number} as {steps[-1]}, and others applied {self.truth[number - 1 :]}"
            )

    def taken_over(self, members: Sequence[Any]) -> None:
        """The next driver continues from these workers. They may have ended the call, and make no step more."""
        self._continue_from(members[0].replica.steps)

    def _continue_from(self, steps: Sequence[Step]) -> None:
        """Count the steps of workers that a driver had given up, if training continues from their state."""
        if any(list(steps) == each and self._is_beyond(name, each) for name, each in self._beyond.items()):
            self.applied_steps += len(steps) - len(self.truth)
            self.truth = list(steps)

    def _begin(self, group: ProcessGroup, base: int) -> None:
        """Check the first step of a generation: it must continue from the most advanced healthy worker."""
        self._began[group.generation] = base
        if base < self.least:
            self.fail(f"generation {group.generation} begins at step {base}, and the user has loaded {self.least}")
        for name, steps in self._discarded:
            if steps > base:
                self.fail(
                    f"{name} had applied {steps} steps and was healthy, but generation {group.generation} begins at {base}"
                )
        self._discarded = []
        if base < len(self.truth):
            holders = [m.name for m in group.members if m.replica is not None and len(m.replica.steps) > base + 1]
            if holders:
                self.fail(f"generation {group.generation} begins at step {base}, but {holders} had more")
            if self.schedule.calm:
                self.fail(f"{len(self.truth) - base} steps are redone, although no fault can be the cause")
            self.redone += len(self.truth) - base
            del self.truth[base:]

    def steps_of_call(self, number: int) -> list[Step]:
        """Return the steps that a call of the engine has made."""
        return [step for step in self.truth if step.call == number]

    def has_trained(self, number: int, num_steps: int | None, *, all_calls: bool) -> None:
        """Check that a call has made all its steps. Those before it have too, whatever failed since, unless training has started
        over."""
        self._trained = {**(self._trained if all_calls else {}), number: num_steps}
        for call, wanted in self._trained.items():
            steps = self.steps_of_call(call)
            if len(steps) != wanted if wanted is not None else not steps or steps[-1].stop != self._plan.samples:
                what = "an epoch" if wanted is None else f"{wanted} steps"
                self.fail(f"call {call} was to train {what}, and after call {number} its steps are {steps}")

    def takes(self, worker: Any, old: Sequence[Step], old_loads: int, new: Sequence[Step], new_loads: int) -> None:
        """Check a state that `worker` loads from another worker, or from a snapshot."""
        if old_loads > new_loads:
            self.fail(f"{worker.name} takes a state from before the user has loaded another one")
        if old_loads == new_loads and list(new[: len(old)]) != list(old):
            self.fail(f"{worker.name} had applied {len(old)} steps and takes a state of {len(new)}: a step is lost")

    def killed(self, worker: Any) -> None:
        """Check that the driver does not kill a worker that waits for one whose process is stopped."""
        group = worker.backend.group
        if self.schedule.phase == "train" and group is not None and group.waits(worker):
            stopped = [each.name for each in group.members if each.stopped_at is not None and not each.given_up]
            if stopped and worker.stopped_at is None:
                self.fail(f"{worker.name} was killed, but it waits for {stopped}, whose processes are stopped")

    def dismissed(self, worker: Any) -> None:
        """Note that the driver ends a worker that is alive."""
        replica = worker.replica
        ended = worker.stopped_at is not None or worker.given_up or worker.lost
        if replica is None or ended or replica.loads != self.loads or worker.name in self._outdated:
            return
        if worker.was_given_up and worker not in self._members:  # a driver before has continued without it
            return
        others = [each.replica.steps for each in self._members if each is not worker and each.replica is not None]
        if all(len(steps) < len(replica.steps) for steps in others):  # otherwise the change was planned
            self._discarded.append((worker.name, len(replica.steps)))

    def saved(self, steps: Sequence[Step]) -> None:
        """Check a state that the user has saved. If all workers were lost since the last step, it can lack some steps."""
        ahead = [each.name for each in self._members if each.replica is not None and each.replica.steps != steps]
        if ahead or list(steps) != self.truth[: len(steps)]:
            self.fail(f"a state with {len(steps)} steps was saved, and {ahead or 'others before'} applied other steps")
        if len(steps) < len(self.truth) and self.schedule.calm:
            self.fail(f"the saved state lacks {len(self.truth) - len(steps)} steps, although no fault can be the cause")

    def copies(self, worker: Any, steps: Sequence[Step]) -> None:
        """Check the state of which a checkpoint is made between two batches of a call. A worker that its driver has given up
        may have applied steps beyond those."""
        if steps != self.truth[: len(steps)] and steps != self._beyond.get(worker.name):
            self.fail(f"{worker.name} makes a checkpoint of other steps than those that are committed")

    def saved_within(self, state: Sequence[Step], contents: Contents, every: int) -> None:
        """Check a checkpoint that was made between two batches of a call: it is that of the batch that it is called after, and
        it has what the call had measured up to there."""
        step, measured = contents.progress.step, contents.call
        if len(state) != step or step % every:
            self.fail(f"the checkpoint after step {step} has {len(state)} steps, and every {every}th is wanted")
        samples = sum(each.stop - each.start for each in state if each.call == contents.progress.call)
        if measured.committed != samples:
            self.fail(
                f"the checkpoint after step {step} has {measured.committed} samples of its call, and not {samples}"
            )
        if self.measures_all and not self.schedule.ended and measured.metrics[NUM_SAMPLES] != samples:
            self.fail(
                f"the call had measured {measured.metrics[NUM_SAMPLES]} samples at the checkpoint, and not {samples}"
            )

    @property
    def measures_all(self) -> bool:
        """Return whether a call has what all its steps measured. After the end of a script, it lacks that of workers which left
        before, or of a step that an error ended."""
        schedule, named = self.schedule, self._plan.orphan_s
        return schedule.calm and not (named and (schedule.announced or schedule.ended or not self._plan.in_place))

    def loaded(self, steps: Sequence[Step], loads: int) -> None:
        """Note that the user has loaded a checkpoint on all ranks."""
        self.truth, self.loads, self.least, self._discarded, self._beyond = list(steps), loads, 0, [], {}
        self._trained = {}

    def has_loaded(self, steps: int, *, shown: bool) -> None:
        """Note that the load has ended. `shown` is whether the driver has a snapshot of the state that was loaded."""
        self.least = steps if shown else 0
        if not shown and self.schedule.calm and self._plan.snapshot_every is not None:
            self.fail("load() has returned, and the driver has no snapshot of the state that was loaded")

    def weights(self, initial: int) -> int:
        """Return the weights of an undisturbed run with these steps."""
        weights = initial
        for step in self.truth:
            weights = weights_after(weights, step.epoch, step.start, step.stop)
        return weights

    def _check_step(self, contributions: Sequence[Any], step: Step) -> None:
        states = {each[:5] for each in contributions}
        if len(states) != 1:
            self.fail(f"the ranks of one all-reduce were not in the same step and state: {sorted(states)}")
        parts = [each[5] for each in contributions]
        seen = [index for part in parts if part.fresh for index in range(part.start, part.stop)]
        if sorted(seen) != list(range(step.start, step.stop)):
            self.fail(f"step {step} used the samples {sorted(seen)}")

    def _check_order(self, steps: Sequence[Step]) -> None:
        """Check that each epoch begins with its first sample, and has no gaps and no repetitions."""
        total, (epoch, start, stop, _) = self._plan.samples, steps[-1]
        if len(steps) == 1:
            expected = start == 0
        else:
            before = steps[-2]
            expected = start == before.stop if epoch == before.epoch else (start == 0 and before.stop == total)
        if not expected:
            self.fail(f"the samples are not each used once: {steps[-2:]}")
        size = self._plan.global_batch
        if size is not None and (start % size or stop != min(start + size, total)):
            self.fail(f"step {steps[-1]} differs from those of an undisturbed run")

    # -- limits on failures ---------------------------------------------------------------------------

    def gave_up(self, failures: int) -> None:
        """Check that a call that raised TrainingFailedError has survived as many failures as it may."""
        if failures <= self._plan.retries or self._plan.retries < 0:
            self.fail(f"a call gave up after {failures} failures, and may survive {self._plan.retries}")

    def survived(self, failures: int) -> None:
        if failures > self._plan.retries >= 0:
            self.fail(f"a call survived {failures} failures, and may survive {self._plan.retries}")

    # -- the user's code ------------------------------------------------------------------------------

    def called_function(self, worker: Any, number: int) -> None:
        """Note that a worker runs a user's function. It runs again only where another rank's function has raised an error while a
        failure was handled, because that counts as a part of the failure."""
        if (worker.name, worker.term, number) in self._called and not self.schedule.ended:
            self.fail(f"{worker.name} ran a function twice in one call")
        self._called.add((worker.name, worker.term, number))

    def thrown(self, error: UserError, worker: Any, recoveries: int) -> None:
        """Note an error of the user's code on a worker; `worker` is None if it need not end the call."""
        self._thrown[id(error)] = error, worker, recoveries

    def raised(self, error: UserError) -> None:
        """Check an error that the script got: a user's error is raised once, unchanged, and never retried."""
        thrown, worker, recoveries = self._thrown.pop(id(error), (None, None, 0))
        if thrown is not error:
            self.fail(f"a user's error was raised more often than it was thrown, or another one: {error}")
        if worker is not None and len(self.engine.recoveries) > recoveries:
            self.fail(f"after a user's error the call continued, before it raised the error: {error}")

    def ended(self) -> None:
        """Note that an error has ended a call. It can hide others of the same call."""
        self._thrown = {key: (error, None, 0) for key, (error, *_) in self._thrown.items()}

    def returned(self) -> None:
        """Check, after a call that raised nothing, that no error of the user's code was swallowed."""
        for error, worker, _ in self._thrown.values():
            if worker is not None and worker.alive and not (worker.given_up or worker.lost or worker.stopped_at):
                self.fail(f"a user's error was swallowed: {error}")
