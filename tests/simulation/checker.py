"""Check what must hold at every moment of a simulated run, whatever fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.simulation.network import ProcessGroup
from tests.simulation.replica import Step

__all__ = ["Checker", "Violation"]


class Violation(BaseException):
    """The engine broke one of its guarantees. This is not an Exception, which a worker would report as the user's
    own."""


class Checker:
    """Sees what the driver cannot see: each applied step, each generation, each state that a worker loads.

    truth       the steps that are applied in the weights with which training continues
    newest      the generation of the last group that has formed
    discarded   the most steps of a healthy worker that the driver has dismissed since the last group began to train
    most        the most members that a group has had
    told        the workers that were told of their preemption
    """

    def __init__(self, plan: Any) -> None:
        self._plan = plan
        self.truth: list[Step] = []
        self.newest = 0
        self.loads = 0
        self.applied_steps = 0
        self.most = 0
        self.told: set[str] = set()
        self._began: dict[int, int] = {}
        self._discarded: list[tuple[str, int]] = []
        self._members: Sequence[Any] = ()
        self.redone = 0

    def formed(self, worker: Any, group: ProcessGroup) -> None:
        if group.generation < self.newest:
            raise Violation(f"{worker.name} joined generation {group.generation}, but {self.newest} was formed already")
        self.newest, self._members = group.generation, group.members
        self.most = max(self.most, len(group.members))

    def told_of_preemption(self, worker: Any, deadline_s: float | None) -> None:
        if worker.name in self.told:
            raise Violation(f"{worker.name} was told of its preemption twice")
        if not (worker.client.control.notice if deadline_s is None else worker.node.draining):
            raise Violation(f"{worker.name} was told that it is stopped in {deadline_s} s, which is not true")
        self.told.add(worker.name)

    def applied(self, worker: Any, group: ProcessGroup, steps: Sequence[Step], contributions: Sequence[Any]) -> None:
        """`worker` has applied a step, the last of `steps`. `contributions` has what each rank contributed to its
        all-reduce."""
        if worker.given_up:
            return  # it was stopped between the all-reduce and its step, and the others continued without it
        self._check_step(worker, contributions, steps[-1])
        _check_order(steps, self._plan.samples)
        if group.generation < self.newest:
            raise Violation(f"{worker.name} trained in generation {group.generation}, but {self.newest} has formed")
        if group.generation not in self._began:
            self._begin(group, len(steps) - 1)
        number = len(steps)
        if number == len(self.truth) + 1 and list(steps[:-1]) == self.truth:
            self.truth.append(steps[-1])
            self.applied_steps += 1
        elif list(steps) != self.truth[:number]:
            raise Violation(
                f"{worker.name} applied step {number} as {steps[-1]}, and others applied {self.truth[number - 1 :]}"
            )

    def _begin(self, group: ProcessGroup, base: int) -> None:
        """Check the first step of a generation: it must continue from the most advanced healthy worker."""
        self._began[group.generation] = base
        for name, steps in self._discarded:
            if steps > base:
                raise Violation(
                    f"{name} had applied {steps} steps and was healthy, but generation {group.generation} begins at {base}"
                )
        self._discarded = []
        if base < len(self.truth):
            holders = [m.name for m in group.members if m.replica is not None and len(m.replica.steps) > base + 1]
            if holders:
                raise Violation(f"generation {group.generation} begins at step {base}, but {holders} had more")
            self.redone += len(self.truth) - base
            del self.truth[base:]

    def takes(self, worker: Any, old: Sequence[Step], old_loads: int, new: Sequence[Step], new_loads: int) -> None:
        """Check a state that `worker` loads from another worker, or from a snapshot."""
        if old_loads == new_loads and list(new[: len(old)]) != list(old):
            raise Violation(
                f"{worker.name} had applied {len(old)} steps and takes a state of {len(new)}: a committed step is lost"
            )

    def dismissed(self, worker: Any) -> None:
        """Note that the driver ends a worker that is alive."""
        replica = worker.replica
        if replica is None or worker.stopped_at is not None or worker.given_up or replica.loads != self.loads:
            return
        others = [each.replica.steps for each in self._members if each is not worker and each.replica is not None]
        if all(len(steps) < len(replica.steps) for steps in others):  # otherwise the change was planned
            self._discarded.append((worker.name, len(replica.steps)))

    def loaded(self, steps: Sequence[Step], loads: int) -> None:
        """Note that the user has loaded a checkpoint on all ranks."""
        self.truth, self.loads, self._discarded = list(steps), loads, []

    def _check_step(self, worker: Any, contributions: Sequence[Any], step: Step) -> None:
        numbers = {each[:4] for each in contributions}
        if len(numbers) != 1:
            raise Violation(f"the ranks of one all-reduce were not at the same step: {sorted(numbers)}")
        seen = [index for *_, part in contributions if part.fresh for index in range(part.start, part.stop)]
        if sorted(seen) != list(range(step[1], step[2])):
            raise Violation(f"step {step} used the samples {sorted(seen)}")


def _check_order(steps: Sequence[Step], total: int) -> None:
    """Check that each epoch begins with its first sample, and has no gaps and no repetitions."""
    epoch, start, _ = steps[-1]
    if len(steps) == 1:
        expected = start == 0
    else:
        before_epoch, _, before_stop = steps[-2]
        expected = start == before_stop if epoch == before_epoch else (start == 0 and before_stop == total)
    if not expected:
        raise Violation(f"the samples are not each used once: {steps[-2:]}")
