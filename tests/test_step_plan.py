"""A schedule follows the plan of its steps by samples, over any changes of the group."""

from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from raysgd.core.sampling_plan import SamplingPlan, StepPlan, optimizer_steps

# (number of batches, world size during these batches); the last one makes the rest of the run
CHANGES = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 7)), min_size=1, max_size=6)


def plan_of(total: int, size: int, workers: int, epochs: int, window: int = 1, *, drop_last: bool = False) -> StepPlan:
    epoch = SamplingPlan(total, size * workers, workers, drop_last)
    steps = optimizer_steps(epochs, batches=epoch.steps_left(0), num_steps=None, window=window)
    return StepPlan.of(epoch, steps, epochs, window)


def followed(plan: StepPlan, changes: list[tuple[int, int]]) -> list[int]:
    """Return how many steps the schedule has made after each batch of the run, and at the end of each epoch."""
    size, made, stages = plan.step_size // plan.workers, [], list(changes)
    for epoch in range(1, plan.epochs + 1):
        offset = 0
        while True:
            while len(stages) > 1 and stages[0][0] == 0:
                stages.pop(0)
            count, world = stages[0]
            now = SamplingPlan(plan.units, size * world, world, plan.drop_last)
            if now.steps_left(offset) == 0:
                break
            stages[0] = (count - 1, world)
            offset = now.offset_after(offset)
            made.append(plan.steps_by(epoch, offset))
        made.append(plan.steps_by(epoch, plan.units))
    return made


PLANS = st.tuples(st.integers(1, 90), st.integers(1, 6), st.integers(1, 6), st.integers(1, 3), st.integers(1, 4))


@settings(max_examples=100, deadline=None)
@given(PLANS, st.booleans(), CHANGES)
def test_it_never_goes_back_and_ends_with_the_plan(
    numbers: tuple[int, int, int, int, int], drop_last: bool, changes: list[tuple[int, int]]
) -> None:
    plan = plan_of(*numbers, drop_last=drop_last)
    made = followed(plan, changes)
    assert made == list(accumulate(made, max)) and made[-1] == plan.steps
    each = plan.steps // plan.epochs
    assert {each * epoch for epoch in range(1, plan.epochs + 1)} <= set(made)  # at the end of each epoch


@settings(max_examples=60, deadline=None)
@given(PLANS, st.booleans())
def test_with_all_workers_it_is_one_step_for_each_window(
    numbers: tuple[int, int, int, int, int], drop_last: bool
) -> None:
    plan = plan_of(*numbers, drop_last=drop_last)
    made = followed(plan, [(0, plan.workers)])
    assert sorted({0, *made}) == list(range(plan.steps + 1))
    if plan.window == 1:
        assert len(made) == plan.steps + plan.epochs  # the ends of epochs add none


def test_after_the_planned_epochs_no_step_is_left() -> None:
    assert plan_of(26, 4, 2, 3).steps_left(SamplingPlan(26, 4, 1), 5, 26) == 0
