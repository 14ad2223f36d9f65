"""Learning-rate schedules: how many steps they have made, how many they have, and when the default
loop steps one. Worker."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LambdaLR

from raysgd.constants import SCHEDULER_STEP_EPOCH, SCHEDULER_STEP_STEP
from raysgd.errors import ConfigError
from raysgd.torch.foreign import nested_schedulers
from raysgd.training.operator_base import Schedule

if TYPE_CHECKING:
    from raysgd.torch.operator import TrainingOperator

ENDED = (
    "%s has made the %d steps for which it was planned, and this call ends with step %d. Training continues with its last learning "
    "rate. A run has more steps than planned if fewer workers train and each keeps its batch (batch_mode is 'per_worker'), or if it is "
    "resumed with more epochs or another num_workers (to plan again, start a new run in another folder)"
)


def steps_of(scheduler: Any) -> Any:
    """Return a number that changes whenever the scheduler steps, None if it has none."""
    steps = getattr(scheduler, "last_epoch", None)
    inner = nested_schedulers(scheduler)  # a ChainedScheduler has no counter of its own
    return steps_of(inner[0]) if steps is None and inner else steps


def step_in_order(scheduler: Any) -> None:
    """Step a scheduler at its time. In its first step, torch warns if the optimizer has not stepped
    before, which is right if that step was left out (for gradients that are not finite), or if the
    first batches of a window come before it."""
    if steps_of(scheduler):
        scheduler.step()
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Detected call of `lr_scheduler\.step\(\)` before", UserWarning)
        scheduler.step()


def length_of(scheduler: Any, *, saved: int | None, planned: int | None) -> int | None:
    """Return how many steps a scheduler has, if it is known: its own `total_steps`, or what
    `total_steps()` returned in the run that made it, `saved`. A loaded LambdaLR has the functions
    of the running script, and so its length, `planned`."""
    own = getattr(scheduler, "total_steps", None)
    if isinstance(own, int):
        return own
    return planned if saved is None or isinstance(scheduler, LambdaLR) else saved


def stepped_twice(operator: str, scheduler: Any, freq: str) -> ConfigError:
    return ConfigError(
        f"{operator}.train_batch steps its scheduler, a {type(scheduler).__name__}, and scheduler_step_freq={freq!r} lets the trainer "
        f"step it after each {freq}, too, so its learning rates would come too early: remove scheduler.step() from train_batch, or "
        "pass scheduler_step_freq='manual'"
    )


class LoopSchedule(Schedule):
    """Steps the schedulers of one loop, and checks that user code does not do that, too."""

    def __init__(self, operator: TrainingOperator, schedulers: list[Any]) -> None:
        self._operator, self._schedulers = operator, schedulers
        self._per_epoch = operator.scheduler_step_freq == SCHEDULER_STEP_EPOCH
        self._steps = [steps_of(each) for each in schedulers]

    def end(self, *, failed: bool = False) -> None:
        operator, step = self._operator, self._operator._feed.step
        if failed:
            if step.outcome == "applied":  # so the batch counts
                self._step()
            return
        for scheduler, before in zip(self._schedulers, self._steps, strict=True):
            if steps_of(scheduler) != before:
                raise stepped_twice(type(operator).__name__, scheduler, str(operator.scheduler_step_freq))
        if step.current.whole:
            self._step()
            self._steps = [steps_of(each) for each in self._schedulers]

    def end_epoch(self) -> None:
        feed = self._operator._feed
        if self._per_epoch and feed.position.call_ended and not feed.stopped:  # otherwise, the call continues
            for each in self._schedulers:
                step_in_order(each)
            feed.position.call_ended = False

    def _step(self) -> None:
        operator = self._operator
        waits = operator.scheduler_step_freq == SCHEDULER_STEP_STEP and not operator._feed.step.closing
        for each in () if self._per_epoch or waits else self._schedulers:
            if not operator._keeps_rate(each):
                step_in_order(each)
