"""An epoch is dealt exactly once, over any schedule of resizes."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysgd.plan import Deal, Share

# (steps taken, size of the world that took them)
SCHEDULE = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 7)), min_size=1, max_size=6)


def dealt(total: int, size: int, schedule: list[tuple[int, int]], *, pad: bool = True) -> list[list[Share]]:
    """Every step of an epoch: each stage of the schedule does so many, and the last world does the rest."""
    steps, offset = [], 0
    for stage, (count, world) in enumerate(schedule):
        deal = Deal(total=total, step_size=size * world, world_size=world, pad=pad)
        left = deal.steps_left(offset)
        for _ in range(left if stage == len(schedule) - 1 else min(count, left)):
            steps.append(deal.shares(offset))
            offset = deal.advance(offset)
    return steps


def units(shares: list[Share]) -> list[int]:
    return [unit for share in shares for unit in range(share.start, share.stop)]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 200), st.integers(1, 9), SCHEDULE, st.booleans())
def test_each_unit_exactly_once_over_any_resizes(
    total: int, size: int, schedule: list[tuple[int, int]], pad: bool
) -> None:
    steps = dealt(total, size, schedule, pad=pad)
    fresh = Counter(unit for shares in steps for unit in units([s for s in shares if s.fresh]))
    assert fresh == Counter(range(total))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 200), st.integers(1, 9), SCHEDULE)
def test_training_gives_every_rank_something_in_every_step(
    total: int, size: int, schedule: list[tuple[int, int]]
) -> None:
    for shares in dealt(total, size, schedule):
        sizes = [share.stop - share.start for share in shares]
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1
        fresh = units([share for share in shares if share.fresh])
        repeated = units([share for share in shares if not share.fresh])
        assert not repeated or len(fresh) < len(shares), "a repeat although there was enough to go round"
        assert set(repeated) <= set(fresh), "what is repeated belongs to the same step"


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 200), st.integers(1, 9), SCHEDULE)
def test_validation_repeats_nothing(total: int, size: int, schedule: list[tuple[int, int]]) -> None:
    steps = dealt(total, size, schedule, pad=False)
    assert units([share for shares in steps for share in shares]) == list(range(total))


@pytest.mark.parametrize(
    ("deal", "offset", "expected"),
    [
        (Deal(total=101, step_size=64, world_size=2), 64, [(64, 83, True), (83, 101, True)]),
        (
            Deal(total=3, step_size=8, world_size=4),
            0,
            [(0, 1, True), (1, 2, True), (2, 3, True), (0, 1, False)],
        ),
        (
            Deal(total=1, step_size=4, world_size=4, pad=False),
            0,
            [(0, 1, True), (1, 1, False), (1, 1, False), (1, 1, False)],
        ),
        (Deal(total=5, step_size=4, world_size=3), 4, [(4, 5, True), (4, 5, False), (4, 5, False)]),
        (Deal(total=8, step_size=8, world_size=3), 0, [(0, 3, True), (3, 6, True), (6, 8, True)]),
        (Deal(total=4, step_size=4, world_size=2), 4, []),
        (Deal(total=4, step_size=4, world_size=2), 9, []),
        (Deal(total=0, step_size=4, world_size=2), 0, []),
    ],
)
def test_shares(deal: Deal, offset: int, expected: list[tuple[int, int, bool]]) -> None:
    assert [(share.start, share.stop, share.fresh) for share in deal.shares(offset)] == expected


@pytest.mark.parametrize(
    ("total", "step", "drop_last", "offset", "left"),
    [
        (10, 4, False, 0, 3),
        (10, 4, True, 0, 2),
        (10, 4, True, 8, 0),
        (10, 4, False, 8, 1),
        (3, 4, True, 0, 0),
        (3, 4, False, 0, 1),
        (0, 4, False, 0, 0),
        (8, 4, False, 20, 0),
    ],
)
def test_steps_left(total: int, step: int, drop_last: bool, offset: int, left: int) -> None:
    deal = Deal(total=total, step_size=step, world_size=2, drop_last=drop_last)
    assert deal.steps_left(offset) == left
    assert [len(list(deal.of(rank, offset))) for rank in range(2)] == [left, left]


def test_one_rank_sees_its_own_shares_of_every_step() -> None:
    deal = Deal(total=10, step_size=4, world_size=2)
    assert list(deal.of(1, 0)) == [deal.shares(offset)[1] for offset in (0, 4, 8)]
