"""Each sample of an epoch is used exactly once, over any schedule of resizes."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysgd.core.sampling_plan import RankPart, SamplingPlan

# (number of steps, world size during these steps)
SCHEDULE = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 7)), min_size=1, max_size=6)


def all_steps(total: int, size: int, schedule: list[tuple[int, int]], *, pad: bool = True) -> list[list[RankPart]]:
    """Return every step of an epoch. Each stage of the schedule makes that many steps, and the last one makes the
    rest."""
    steps, offset = [], 0
    for stage, (count, world) in enumerate(schedule):
        plan = SamplingPlan(total=total, step_size=size * world, world_size=world, pad=pad)
        left = plan.steps_left(offset)
        for _ in range(left if stage == len(schedule) - 1 else min(count, left)):
            steps.append(plan.parts(offset))
            offset = plan.offset_after(offset)
    return steps


def units(parts: list[RankPart]) -> list[int]:
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


@pytest.mark.parametrize(
    ("plan", "offset", "expected"),
    [
        (SamplingPlan(total=101, step_size=64, world_size=2), 64, [(64, 83, True), (83, 101, True)]),
        (
            SamplingPlan(total=3, step_size=8, world_size=4),
            0,
            [(0, 1, True), (1, 2, True), (2, 3, True), (0, 1, False)],
        ),
        (
            SamplingPlan(total=1, step_size=4, world_size=4, pad=False),
            0,
            [(0, 1, True), (1, 1, False), (1, 1, False), (1, 1, False)],
        ),
        (SamplingPlan(total=5, step_size=4, world_size=3), 4, [(4, 5, True), (4, 5, False), (4, 5, False)]),
        (SamplingPlan(total=8, step_size=8, world_size=3), 0, [(0, 3, True), (3, 6, True), (6, 8, True)]),
        (SamplingPlan(total=4, step_size=4, world_size=2), 4, []),
        (SamplingPlan(total=0, step_size=4, world_size=2), 0, []),
    ],
)
def test_parts(plan: SamplingPlan, offset: int, expected: list[tuple[int, int, bool]]) -> None:
    assert [(part.start, part.stop, part.fresh) for part in plan.parts(offset)] == expected


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
    plan = SamplingPlan(total=total, step_size=step, world_size=2, drop_last=drop_last)
    assert plan.steps_left(offset) == left
    assert [len(list(plan.parts_of(rank, offset))) for rank in range(2)] == [left, left]


def test_the_parts_of_one_rank() -> None:
    plan = SamplingPlan(total=10, step_size=4, world_size=2)
    assert list(plan.parts_of(1, 0)) == [plan.parts(offset)[1] for offset in (0, 4, 8)]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 60), st.integers(1, 6), st.integers(2, 6), st.integers(1, 5), st.booleans())
def test_pieces_can_be_the_parts_that_missing_workers_would_have(
    total: int, size: int, workers: int, ranks: int, drop: bool
) -> None:
    usual = SamplingPlan(total, size * workers, workers, drop_last=drop)
    fewer = SamplingPlan(total, size * workers, min(ranks, workers), drop_last=drop, workers=workers)
    of_ranks = [list(fewer.parts_of(rank, 0)) for rank in range(fewer.world_size)]
    expected = [list(usual.parts_of(rank, 0)) for rank in range(workers)]
    assert len({len(parts) for parts in of_ranks}) == 1, "ranks exchange gradients after equally many pieces"
    places = {(part.start, part.stop, part.part) for parts in expected for part in parts if part.fresh}
    found = [part for parts in of_ranks for part in parts]
    assert sorted((p.start, p.stop, p.part) for p in found if p.fresh) == sorted(places)
    assert {(p.start, p.stop) for p in found} == {place[:2] for place in places}, "what is repeated is a part, too"
    pieces = -(-workers // fewer.world_size) if fewer.world_size < workers else 1
    for parts in of_ranks:
        steps = {frozenset(p.part for p in parts[start : start + pieces]) for start in range(0, len(parts), pieces)}
        assert len(steps) <= 1, "a rank has the same parts in each step"
    firsts = [
        part for before, part in zip([None, *of_ranks[0]], of_ranks[0], strict=False) if before is None or before.whole
    ]
    assert [(part.start, part.stop) for part in firsts] == [(part.start, part.stop) for part in expected[0]]
    for offset in range(0, total - drop * (size * workers - 1), size * workers):
        rows = min(total - offset, size * workers)
        weights = [p.weight for p in found if offset <= p.start < offset + rows]
        assert sum(weights) == pytest.approx(fewer.world_size), "the mean over the ranks is the mean over the samples"
