"""The learning-rate schedule that the default loop steps: when it does, and how it follows the plan
of `total_steps()`. Worker."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from raysgd.constants import SCHEDULER_STEP_EPOCH, SCHEDULER_STEP_STEP
from raysgd.core.sampling_plan import StepPlan
from raysgd.torch.schedules import has_length_in_code, step_in_order, stepped_twice, steps_of
from raysgd.training.operator_base import Schedule
from raysgd.training.position import Position

if TYPE_CHECKING:
    from raysgd.torch.operator import TrainingOperator

logger = logging.getLogger("raysgd")

PLAN_CHANGED = (
    "total_steps() planned %d optimizer steps with num_workers=%d. With %d from now on, this run makes %d, so a schedule that your code "
    "steps does not end with the run. ElasticConfig(batch='global') keeps the number of steps when the workers change; with "
    "scheduler_step_freq='step', the trainer steps the scheduler, and lets it follow the plan"
)


class LoopSchedule(Schedule):
    """Steps the scheduler of one loop, and checks that user code does not do that, too."""

    def __init__(self, operator: TrainingOperator, scheduler: Any) -> None:
        self._operator, self._scheduler = operator, scheduler
        self._per_epoch = operator.scheduler_step_freq == SCHEDULER_STEP_EPOCH
        self._steps = steps_of(scheduler)

    def end(self, *, failed: bool = False) -> None:
        operator, step = self._operator, self._operator._feed.step
        if failed:
            if step.outcome == "applied":  # so the batch counts
                self._step()
            return
        if steps_of(self._scheduler) != self._steps:
            raise stepped_twice(type(operator).__name__, self._scheduler, str(operator.scheduler_step_freq))
        if step.current.whole:
            self._step()
            self._steps = steps_of(self._scheduler)

    def end_epoch(self) -> None:
        self._step(ended=True)
        if self._per_epoch and self._operator._feed.epoch_ended:
            step_in_order(self._scheduler)

    def _step(self, *, ended: bool = False) -> None:
        if not self._per_epoch:
            for _ in range(due_steps(self._operator, ended=ended)):
                if not self._operator._keeps_rate(self._scheduler):
                    step_in_order(self._scheduler)


def due_steps(operator: TrainingOperator, *, ended: bool) -> int:
    """Return how many steps of the schedule are due: after a batch (or after the last one of a
    step, with "step"), one, or as many as bring it to where the plan has processed the same
    samples; with `ended`, those that are left when an epoch ends. The count is part of the
    position, so survivors, replacement workers and restarts agree."""
    step, plan, position = operator._feed.step, operator._plan, operator._feed.position
    if operator.scheduler_step_freq == SCHEDULER_STEP_STEP and not step.closing:
        return 0
    if plan is None or position.parked is not None or (not step.drawn and not ended):
        position.planned = 0
        return int(not ended)
    if ended and not position.ended:
        return 0
    if not position.planned or position.plan != plan:  # it begins here
        position.plan, position.planned = tuple(plan), plan.steps_by(position.epoch, position.offset)
    made = plan.steps_by(position.epoch, plan.units if ended else step.current.offset)
    due = max(made - position.planned, 0)
    position.planned += due
    return due


def check_plan(operator: TrainingOperator, position: Position, ranks: int, *, warns: bool) -> None:
    """Warn once if the rest of the run does not have the steps that were planned, and user code
    steps by them."""
    plan = operator._plan
    if plan is None or position.plan == () or operator._steps_schedule or position.planned:
        return
    now = operator._planned_epoch(ranks)
    if now is None:
        return
    place = position.epoch, plan.units if position.ended else position.offset
    rest, planned = (plan.steps_left(each, *place) for each in (now, plan.epoch))
    position.plan = tuple(plan) if rest == planned else ()
    if rest != planned and warns:
        logger.warning(PLAN_CHANGED, plan.steps, plan.workers, now.world_size, plan.steps - planned + rest)


def restore_plan(operator: TrainingOperator, position: Position) -> None:
    """Follow the plan for which a loaded schedule was made. A function of the user's code has the
    length that this run planned, so its step is changed to where this run's plan has processed the
    same samples."""
    plan = operator._plan
    if not position.plan or plan is None or plan.divides_like(saved := StepPlan(*position.plan)):
        return
    scheduler: Any = operator._own_scheduler() if position.planned and operator._steps_schedule else None
    if not has_length_in_code(scheduler):
        operator._plan = saved
        return
    place = plan.units if position.ended else position.offset
    position.plan, position.planned = tuple(plan), plan.steps_by(position.epoch, place)
    scheduler.last_epoch = position.planned
