"""Each sample of an epoch is used exactly once, over any schedule of resizes."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysgd.core.decisions.sampling_plan import RankShare, SamplingPlan

# (number of steps, world size during these steps)
SCHEDULE = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 7)), min_size=1, max_size=6)


def all_steps(total: int, size: int, schedule: list[tuple[int, int]], *, pad: bool = True) -> list[list[RankShare]]:
    """Return every step of an epoch. Each stage of the schedule makes that many steps, and the last one makes the
    rest."""
    steps, offset = [], 0
    for stage, (count, world) in enumerate(schedule):
        plan = SamplingPlan(total, size * world, parts=world, world_size=world, pad=pad)
        left = plan.steps_left(offset)
        for _ in range(left if stage == len(schedule) - 1 else min(count, left)):
            steps.append([part for rank in range(world) for part in plan.of_rank(rank, offset)])
            offset = plan.offset_after(offset)
    return steps


def units(parts: list[RankShare]) -> list[int]:
    return [unit for part in parts for unit in range(part.start, part.stop)]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 200), st.integers(1, 9), SCHEDULE, st.booleans())
def test_each_unit_is_used_exactly_once_over_any_resizes(
    total: int, size: int, schedule: list[tuple[int, int]], pad: bool
) -> None:
    steps = all_steps(total, size, schedule, pad=pad)
    fresh = Counter(unit for parts in steps for unit in units([s for s in parts if s.fresh]))
    assert fresh == Counter(range(total))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 200), st.integers(1, 9), SCHEDULE)
def test_in_training_every_rank_has_a_part_of_every_step(
    total: int, size: int, schedule: list[tuple[int, int]]
) -> None:
    for parts in all_steps(total, size, schedule):
        sizes = [part.stop - part.start for part in parts]
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1
        fresh = units([part for part in parts if part.fresh])
        repeated = units([part for part in parts if not part.fresh])
        assert not repeated or len(fresh) < len(parts), "a unit was repeated although there were enough"
        assert set(repeated) <= set(fresh), "repeated units are of the same step"


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 200), st.integers(1, 9), SCHEDULE)
def test_validation_repeats_nothing(total: int, size: int, schedule: list[tuple[int, int]]) -> None:
    steps = all_steps(total, size, schedule, pad=False)
    assert units([part for parts in steps for part in parts]) == list(range(total))


def plan_of(total: int, step_size: int, workers: int, **more: bool) -> SamplingPlan:
    return SamplingPlan(total, step_size, parts=workers, world_size=workers, **more)


@pytest.mark.parametrize(
    ("plan", "offset", "expected"),
    [
        (plan_of(101, 64, 2), 64, [[(64, 83, True)], [(83, 101, True)]]),
        (plan_of(3, 8, 4), 0, [[(0, 1, True)], [(1, 2, True)], [(2, 3, True)], [(0, 1, False)]]),
        (plan_of(1, 4, 4, pad=False), 0, [[(0, 1, True)], [], [], []]),
        (plan_of(5, 4, 3), 4, [[(4, 5, True)], [(4, 5, False)], [(4, 5, False)]]),
        (plan_of(8, 8, 3), 0, [[(0, 3, True)], [(3, 6, True)], [(6, 8, True)]]),
        (plan_of(4, 4, 2), 4, [[], []]),
        (plan_of(0, 4, 2), 0, [[], []]),
    ],
)
def test_parts(plan: SamplingPlan, offset: int, expected: list[list[tuple[int, int, bool]]]) -> None:
    ranks = range(plan.world_size)
    assert [[(part.start, part.stop, part.fresh) for part in plan.of_rank(rank, offset)] for rank in ranks] == expected


@pytest.mark.parametrize(
    ("total", "step", "drop_last", "offset", "left"),
    [
        (10, 4, False, 0, 3),
        (10, 4, True, 0, 2),
        (10, 4, True, 8, 0),
        (3, 4, True, 0, 0),
        (3, 4, False, 0, 1),
        (0, 4, False, 0, 0),
        (8, 4, False, 20, 0),
    ],
)
def test_steps_left(total: int, step: int, drop_last: bool, offset: int, left: int) -> None:
    plan = plan_of(total, step, 2, drop_last=drop_last)
    assert plan.steps_left(offset) == left
    assert [len(list(plan.parts_of(rank, offset))) for rank in range(2)] == [left, left]


def test_the_parts_of_one_rank() -> None:
    plan = plan_of(10, 4, 2)
    assert list(plan.parts_of(1, 0)) == [
        (after, plan.step_at(offset)[1]) for offset, after in ((0, 4), (4, 8), (8, 10))
    ]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 60), st.integers(1, 6), st.integers(2, 6), st.integers(1, 5), st.booleans(), st.booleans())
def test_fewer_ranks_have_the_parts_of_all(
    total: int, size: int, workers: int, ranks: int, drop: bool, pad: bool
) -> None:
    usual = plan_of(total, size * workers, workers, drop_last=drop, pad=pad)
    fewer = SamplingPlan(total, size * workers, workers, min(ranks, workers), drop_last=drop, pad=pad)
    of_ranks = [list(fewer.parts_of(rank, 0)) for rank in range(fewer.world_size)]
    expected = [part for rank in range(workers) for part in usual.parts_of(rank, 0)]
    if pad:
        assert len({len(parts) for parts in of_ranks}) == 1, "ranks exchange gradients after equally many parts"
    places = {(after, part.start, part.stop, part.part) for after, part in expected if part.fresh}
    found = [pair for parts in of_ranks for pair in parts]
    assert sorted((after, p.start, p.stop, p.part) for after, p in found if p.fresh) == sorted(places)
    assert {(after, p.start, p.stop) for after, p in found} == {each[:3] for each in places}, "only parts are repeated"
    assert pad or all(part.fresh for _, part in found)
    for parts in of_ranks:
        last = {after: part.part for after, part in parts}
        assert all(part.last_part or last[after] >= part.part for after, part in parts)
        assert sum(part.last_part for _, part in parts) == len(last), "a step has one last part on each rank"
        of_steps = {frozenset(part.part for at, part in parts if at == after) for after in last}
        assert not pad or len(of_steps) <= 1, "a rank has the same parts in each step"
    if pad:
        assert [part.part for _, part in of_ranks[0]][:1] == [0] * bool(of_ranks[0]), (
            "the first rank has the first part"
        )
    for after in {after for after, _ in found}:
        weights = [part.weight for at, part in found if at == after]
        assert sum(weights) == pytest.approx(fewer.world_size), "the mean over the ranks is the mean over the samples"


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 60), st.integers(1, 6), st.lists(st.integers(1, 5), min_size=2, max_size=4))
def test_with_a_deal_each_rank_has_its_parts_in_each_step(total: int, size: int, deal: list[int]) -> None:
    """Also in the last one, if that has fewer: what a rank keeps for a part would get lost otherwise."""
    plan = SamplingPlan(total, size * sum(deal), sum(deal), len(deal), deal=tuple(deal))
    first = 0
    for rank, count in enumerate(deal):
        own = list(plan.parts_of(rank, 0))
        for step in {after for after, _ in own}:
            assert [part.part for after, part in own if after == step] == list(range(first, first + count))
        first += count
    fresh = [part for rank in range(len(deal)) for _, part in plan.parts_of(rank, 0) if part.fresh]
    assert sorted(unit for part in fresh for unit in range(part.start, part.stop)) == list(range(total))
