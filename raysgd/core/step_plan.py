"""The optimizer steps that `total_steps()` planned, and where a run is among them. Pure arithmetic
on positions. Both."""

from __future__ import annotations

from typing import NamedTuple

from raysgd.core.sampling_plan import SamplingPlan


class StepPlan(NamedTuple):
    """A run of `epochs`, in each of which all `workers` together take `step_size` of its `units` in
    each batch, and `window` batches share a step.

    Samples, and not steps, measure how far a run is, because a group of another size needs another
    number of steps for the same samples. If all workers take part, both are the same. Part of a
    replica's state, as a tuple.
    """

    steps: int
    epochs: int
    workers: int
    units: int
    step_size: int
    drop_last: bool
    window: int = 1

    @classmethod
    def of(cls, epoch: SamplingPlan, steps: int, epochs: int, window: int = 1) -> StepPlan:
        return cls(steps, epochs, epoch.world_size, epoch.total, epoch.step_size, epoch.drop_last, window)

    @property
    def epoch(self) -> SamplingPlan:
        """Return how all workers divide an epoch."""
        return SamplingPlan(self.units, self.step_size, self.workers, self.drop_last)

    def divides_like(self, other: StepPlan) -> bool:
        """Return whether the epochs of the other plan have the same steps."""
        return self[2:] == other[2:]

    def steps_by(self, epoch: int, offset: int) -> int:
        """Return how many of the planned steps are complete at this offset of an epoch, which is
        counted from 1. (Before the first epoch, `offset` is `units`.)

        The next batch begins at that offset. So it has the learning rate with which the plan trains
        its first sample.
        """
        batches = self.units // self.step_size if self.drop_last else -(-self.units // self.step_size)
        each, begun = -(-batches // self.window), offset // self.step_size
        return (epoch - 1) * each + (each if offset >= self.units or begun >= batches else begun // self.window)

    def steps_left(self, now: SamplingPlan, epoch: int, offset: int) -> int:
        """Return how many steps the rest of the run has if `now` divides its epochs."""
        rest, each = now.steps_left(offset), now.steps_left(0)
        return -(-rest // self.window) + max(self.epochs - epoch, 0) * -(-each // self.window)
