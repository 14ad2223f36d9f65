"""Learning-rate schedules: how many steps they have made, how many they have, and when the default
loop steps one. Worker."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, PolynomialLR

from raysgd.constants import SCHEDULER_STEP_BATCH, SCHEDULER_STEP_EPOCH, SCHEDULER_STEP_MANUAL, SCHEDULER_STEP_STEP
from raysgd.core.sampling_plan import optimizer_steps
from raysgd.errors import ConfigError, counted
from raysgd.torch.foreign import milestones_of, nested_schedulers
from raysgd.training.operator_base import Schedule

if TYPE_CHECKING:
    from raysgd.torch.operator import TrainingOperator

ENDED = (
    "%s has made the %d steps for which it was planned, and this call ends with step %d. Training continues with its last learning "
    "rate. A run has more steps than planned if fewer workers train and each keeps its batch (batch_mode is 'per_worker'), or if it is "
    "resumed with more epochs or another num_workers (to plan again, start a new run in another folder)"
)
OTHER_LENGTH = (
    "%s ends with its step %d, and makes %d until the end of this %s: %s. Make it for the epochs that are trained%s. Nothing to do if "
    "another length is meant"
)
COUNTED_BY_LOADER = "; len(loader) in setup has the batches of all workers"
# Where a schedule has its length, and what comes after that, if it is not the last rate.
LENGTHS = {
    OneCycleLR: ("total_steps", "it raises an error then"),
    CosineAnnealingLR: ("T_max", "its learning rate rises again then"),
    PolynomialLR: ("total_iters", "its learning rate is 0 then"),
    LinearLR: ("total_iters", ""),  # a warm-up can end at any time
}


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


def compare_with_run(operator: TrainingOperator, scheduler: Any) -> None:
    """Warn if a schedule that begins has another length than the running loop, or if one ends in
    the call that begins."""
    position, planned = operator._feed.position, operator._planned_steps
    known, made = _length_and_end(scheduler, planned), steps_of(scheduler)
    if known is None or made is None or position.call_batches or position.parked is not None:
        return
    (length, end), epochs = known, 0 if made else operator._run_length[0] or 0
    by_user = operator.scheduler_step_freq == SCHEDULER_STEP_MANUAL
    here = _steps_in(operator, epochs or 1, operator._settings.num_workers)
    if here is None or (by_user and length != planned):
        return
    total, most = made + here, max(length, planned or 0)
    by_loader = length == _steps_in(operator, epochs, 1) != total
    if end and total > most and (epochs or _goes_on(operator, most)):
        consequence = end
    elif total < length and (epochs > 1 or by_loader):
        consequence = "training ends before the schedule, with another learning rate than its last one"
    else:
        return
    until = f"loop over {counted(epochs, 'epoch')}" if epochs else "call of train()"
    how = f", with self.total_steps(epochs={epochs or '...'})"
    how = "" if operator.scheduler_step_freq == SCHEDULER_STEP_EPOCH else how + COUNTED_BY_LOADER * by_loader
    operator._warn_once(OTHER_LENGTH, type(scheduler).__name__, length, total, until, consequence, how)


def _goes_on(operator: TrainingOperator, most: int) -> bool:
    """Return whether the epoch that begins needs more steps than these also with all workers.
    Otherwise a schedule keeps its last rate."""
    position, num_steps = operator._feed.position, operator._run_length[1]
    needed = _steps_in(operator, position.call_epoch, operator._settings.num_workers) or 0
    return num_steps is not None or (position.ended and needed > most)


def _steps_in(operator: TrainingOperator, calls: int, workers: int) -> int | None:
    """Return how many steps a schedule makes in calls of `train` like the running one."""
    freq, num_steps = operator.scheduler_step_freq, operator._run_length[1]
    if freq == SCHEDULER_STEP_EPOCH:
        return calls if num_steps is None else None
    batches = None if operator._parts.train_loader is None else operator._batches_per_epoch(workers) or None
    if freq is None or (batches is None and num_steps is None):
        return None
    window = 1 if freq == SCHEDULER_STEP_BATCH else operator._batches_per_step
    return optimizer_steps(calls, batches=batches, num_steps=num_steps, window=window)


def _length_and_end(scheduler: Any, planned: int | None) -> tuple[int, str] | None:
    """Return after how many steps a schedule ends, and what comes then, if that is known."""
    if milestones := milestones_of(scheduler):
        last = _length_and_end(nested_schedulers(scheduler)[-1], None)
        return None if last is None else (milestones[-1] + last[0], last[1])
    if isinstance(scheduler, LambdaLR):
        return None if planned is None else (planned, "its function gets more steps than total_steps() has returned")
    name, end = next((value for kind, value in LENGTHS.items() if isinstance(scheduler, kind)), ("", ""))
    length = getattr(scheduler, name, None)
    return (length, end) if isinstance(length, int) else None


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
