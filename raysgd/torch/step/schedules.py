"""Learning-rate schedules: when the default loop steps one, and whether its length is that of the
run. Worker."""

from __future__ import annotations

import warnings
from typing import Any

from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, PolynomialLR

from raysgd import constants
from raysgd.core.decisions.sampling_plan import optimizer_steps
from raysgd.errors import ConfigError, counted
from raysgd.torch.foreign import milestones_of, nested_schedulers, steps_of
from raysgd.torch.registered import check_steps_alone
from raysgd.torch.settings import TorchSettings
from raysgd.torch.step.stepping import Stepping

OTHER_LENGTH = (
    "%s ends with its step %d, and makes %d until the end of this %s: %s. Make it for the epochs that are trained%s. Ignore this if you "
    "want another length"
)
STEPPED_BESIDE = (
    "%s was stepped between two loops of raysgd (by update_scheduler(), in apply_all_operators(), or around super().train_epoch()), and "
    "scheduler_step_freq=%r lets the trainer step it, too. Its learning rates come too early. Remove one of the two, or pass "
    "scheduler_step_freq='manual'. Ignore this if you want both"
)
COUNTED_BY_LOADER = "; len(loader) in setup has the batches of all workers"
MISSING = "; fewer workers than num_workers make more steps, as batch_mode is 'per_worker'"
# Where a schedule has its length, and what comes after that, if it is not the last rate.
LENGTHS = {
    OneCycleLR: ("total_steps", "it raises an error then"),
    CosineAnnealingLR: ("T_max", "its learning rate rises again then"),
    PolynomialLR: ("total_iters", "its learning rate is 0 then"),
    LinearLR: ("total_iters", ""),  # a warm-up can end at any time
}


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


def compare_with_run(operator: Scheduling, scheduler: Any) -> None:
    """Warn if a schedule that begins has another length than the running loop, or if one ends in
    the call that begins."""
    position, planned = operator._internals.feed.position, operator._internals.planned_steps
    known, steps = _length_and_end(scheduler, planned), steps_of(scheduler)
    if known is None or steps is None or position.call_batches or position.parked is not None:
        return
    (length, end), epochs = known, 0 if steps else operator._internals.epochs or 0
    by_user = operator.scheduler_step_freq == constants.SCHEDULER_STEP_MANUAL
    by_epoch = operator.scheduler_step_freq == constants.SCHEDULER_STEP_EPOCH
    here = _steps_in(operator, epochs or 1, workers := _workers_now(operator))
    if here is None or (by_user and length != planned):
        return
    total, most = steps + here, max(length, planned or 0)
    by_loader = length == _steps_in(operator, epochs, 1) != total
    if end and total > most and (epochs or _goes_on(operator, most, workers)):
        consequence = end
    elif by_epoch and not steps and epochs <= 1 < _optimizer_steps(operator, workers) and length == planned:
        consequence = "it makes one in each epoch, and total_steps() has counted those of the optimizer"
    elif total < length and (epochs > 1 or by_loader):
        consequence = "training ends before the schedule, with another learning rate than its last one"
    else:
        return
    until = f"loop over {counted(epochs, 'epoch')}" if epochs else "call of train()"
    until += f" with num_steps={operator._internals.num_steps}" * bool(operator._internals.num_steps)
    how = f", with self.total_steps(epochs={epochs or '...'})"
    missing = workers < operator._settings.num_workers
    how = "" if by_epoch else how + COUNTED_BY_LOADER * by_loader + MISSING * (missing and not by_loader)
    operator._internals.warn_once(OTHER_LENGTH, type(scheduler).__name__, length, total, until, consequence, how)


def _workers_now(operator: Scheduling) -> int:
    """How many workers a step needs: while some are missing, only per worker fewer."""
    internals = operator._internals
    return (
        internals.rank_info.world_size
        if internals.keep_batch.mode == constants.PER_WORKER
        else operator._settings.num_workers
    )


def _optimizer_steps(operator: Scheduling, workers: int) -> int:
    """Count the optimizer's steps in an epoch, 0 if not known."""
    batches = None if operator._registered.train_loader is None else operator._batches_per_epoch(workers)
    window = operator._batches_per_step
    return optimizer_steps(1, batches=batches, num_steps=None, window=window) if batches is not None else 0


def _goes_on(operator: Scheduling, most: int, workers: int) -> bool:
    """Whether the epoch that begins needs more steps than these."""
    position, num_steps = operator._internals.feed.position, operator._internals.num_steps
    needed = _steps_in(operator, position.call_epoch, workers) or 0
    return num_steps is not None or (position.ended and needed > most)


def _steps_in(operator: Scheduling, calls: int, workers: int) -> int | None:
    """Count the steps that a schedule makes in calls of `train` like the running one."""
    freq, num_steps = operator.scheduler_step_freq, operator._internals.num_steps
    batches = None if operator._registered.train_loader is None else operator._batches_per_epoch(workers) or None
    if freq == constants.SCHEDULER_STEP_EPOCH and num_steps is not None:
        return None if batches is None else min(calls, calls * num_steps // batches)  # of the data, that end in a call
    if freq == constants.SCHEDULER_STEP_EPOCH:
        return calls
    if freq is None or (batches is None and num_steps is None):
        return None
    window = 1 if freq == constants.SCHEDULER_STEP_BATCH else operator._batches_per_step
    return optimizer_steps(calls, batches=batches, num_steps=num_steps, window=window)


def _length_and_end(scheduler: Any, planned: int | None) -> tuple[int, str] | None:
    """Find after how many steps a schedule ends, and what comes then, if that is known."""
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
        f"step it after each {freq}, too. Its learning rates would come too early. Remove scheduler.step() from train_batch, or pass "
        "scheduler_step_freq='manual'"
    )


class LoopSchedule:
    """Steps the schedulers of one loop, and checks that user code does not do that, too."""

    def __init__(self, operator: Scheduling, schedulers: list[Any]) -> None:
        self._operator, self._schedulers = operator, schedulers
        self._per_epoch = operator.scheduler_step_freq == constants.SCHEDULER_STEP_EPOCH
        position = operator._internals.feed.position
        if self._per_epoch and position.overdue:
            self._step_all()
            position.overdue = False
        self._steps = [steps_of(each) for each in schedulers]
        known, operator._registered.schedules_at = operator._registered.schedules_at, {}
        for each, steps in zip(schedulers, self._steps, strict=True):
            if known.get(id(each), steps) != steps:
                operator._internals.warn_once(STEPPED_BESIDE, type(each).__name__, operator.scheduler_step_freq)

    def end_part(self, *, failed: bool = False) -> None:
        """Step after a part of a batch; `failed` is whether `train_batch` has raised an error."""
        operator, step = self._operator, self._operator._internals.feed.step
        if failed:
            if step.outcome == "applied":  # so the batch counts
                self._step()
            return
        for scheduler, before in zip(self._schedulers, self._steps, strict=True):
            if steps_of(scheduler) != before:
                raise stepped_twice(type(operator).__name__, scheduler, str(operator.scheduler_step_freq))
        if step.current.last_part:
            self._step()
            self._steps = [steps_of(each) for each in self._schedulers]

    def end_epoch(self) -> None:
        feed = self._operator._internals.feed
        if self._per_epoch and feed.position.call_ended and not feed.stopped:  # otherwise, the call continues
            self._step_all()
            feed.position.call_ended = False
        self._operator._registered.schedules_at = {id(each): steps_of(each) for each in self._schedulers}

    def _step_all(self) -> None:
        for each in self._schedulers:
            step_in_order(each)

    def _step(self) -> None:
        operator = self._operator
        waits = (
            operator.scheduler_step_freq == constants.SCHEDULER_STEP_STEP and not operator._internals.feed.step.closing
        )
        for each in () if self._per_epoch or waits else self._schedulers:
            step_in_order(each)


class Scheduling(Stepping):
    """The part of torch's operators that steps schedulers in the default loop."""

    _settings: TorchSettings

    @property
    def scheduler_step_freq(self) -> str | None:
        return self._settings.scheduler_step_freq

    @property
    def _batches_per_step(self) -> int:
        return self._settings.options.accumulate

    def _own_schedulers(self) -> list[Any]:
        """The schedulers that the default loop steps: `self.scheduler`, or all registered ones,
        also if `self.scheduler` is the list in which they were registered."""
        scheduler = getattr(self, "scheduler", None)
        schedulers = [scheduler] if callable(getattr(scheduler, "step", None)) else self._registered.schedulers
        for each in schedulers if self.scheduler_step_freq in constants.STEPPED_BY_TRAINER else ():
            check_steps_alone(each, str(self.scheduler_step_freq))
        return schedulers

    def _begin_epoch(self) -> LoopSchedule | None:
        schedulers, steps = self._own_schedulers(), self.scheduler_step_freq in constants.STEPPED_BY_TRAINER
        schedule = LoopSchedule(self, schedulers) if steps and schedulers else None
        for each in schedulers:
            compare_with_run(self, each)
        return schedule
