"""How the parts of a batch are dealt to ranks by the speeds that they have measured."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysgd.core.decisions.dealing import EVERY, REMEMBERED, BySpeed, dealt, longest, usual_seconds
from tests.core.dealing_runs import run

SECONDS = st.lists(st.floats(0.01, 10.0), min_size=1, max_size=4)


def all_deals(parts: int, ranks: int) -> list[tuple[int, ...]]:
    if ranks == 1:
        return [(parts,)]
    return [(first, *rest) for first in range(1, parts - ranks + 2) for rest in all_deals(parts - first, ranks - 1)]


@settings(max_examples=200, deadline=None)
@given(SECONDS, st.integers(0, 6))
def test_no_other_deal_ends_earlier(seconds: list[float], more: int) -> None:
    parts = len(seconds) + more
    deal = dealt(parts, seconds)
    assert sum(deal) == parts and min(deal) >= 1
    assert longest(deal, seconds) == min(longest(each, seconds) for each in all_deals(parts, len(seconds)))


@pytest.mark.parametrize(
    ("parts", "seconds", "deal"),
    [(7, [1.0] * 3, (3, 2, 2)), (8, [1 / 3, 1.0], (6, 2)), (4, [1 / 9, 1.0], (3, 1)), (12, [0.1, 0.2], (8, 4))],
)
def test_deals(parts: int, seconds: list[float], deal: tuple[int, ...]) -> None:
    assert dealt(parts, seconds) == deal


def steps(policy: BySpeed, count: int, seconds: list[float]) -> list[int]:
    """Return after which of these steps the deal has changed."""
    return [step for step in range(1, count + 1) if policy.due() and policy.change(seconds)]


def test_a_deal_changes_after_enough_steps_and_for_a_tenth_of_a_step() -> None:
    policy = BySpeed(8, [None, None])
    assert policy.deal == (4, 4)
    assert steps(policy, 500, [0.1, 0.12]) == [], "5 to 3 would take 0.5 s in place of 0.48 s"
    assert steps(policy, 500, [0.1, 0.3]) == [50]
    assert policy.deal == (6, 2)


def test_each_change_doubles_the_wait_until_it_is_forgotten() -> None:
    policy, changes, step = BySpeed(8, [0.1, 0.1]), list[int](), 0
    while step < REMEMBERED:
        fast, slow = (0.1, 0.3) if policy.deal[0] < 5 else (0.3, 0.1)  # another deal is better after each change
        step += 1
        if policy.due() and policy.change([fast, slow]):
            changes.append(step)
    waits = [after - before for before, after in pairwise(changes)]
    assert changes[0] == EVERY and waits == [EVERY << each for each in range(1, len(waits) + 1)]
    assert steps(policy, 2 * REMEMBERED, [0.1, 0.1])[-1:] != [], "a rank that recovers gets its share back"
    assert policy.deal == (4, 4) and policy.window == EVERY


@pytest.mark.parametrize("every", [1, 2, 3, 5, 9])
def test_a_rank_that_is_stopped_again_and_again_gets_fewer_parts(every: int) -> None:
    """Each stop is as long as the steps between two of them: so the rank is half as fast, but its median is as usual."""
    stopped = [0.1 + 0.1 * every * (step % every == 0) for step in range(EVERY)]
    policy = BySpeed(12, [None, None])
    assert steps(policy, EVERY, [usual_seconds([0.1] * EVERY), usual_seconds(stopped)]) == [EVERY]
    assert policy.deal in ((8, 4), (7, 5))


def test_one_long_pause_changes_nothing() -> None:
    paused = [0.1] * (EVERY - 1) + [60.0]
    assert steps(BySpeed(12, [None, None]), EVERY, [usual_seconds([0.1] * EVERY), usual_seconds(paused)]) == []


@pytest.mark.parametrize("seed", range(200))
def test_runs(seed: int) -> None:
    shown = run(seed)
    assert len(shown.changes) <= 8 and all(each % EVERY == 0 for each in shown.changes)
    assert shown.seconds <= 1.05 * shown.equal
    if shown.kind in ("equal", "slow"):
        assert shown.late <= EVERY
    elif shown.kind != "alternates":
        assert shown.late <= shown.turn + 4 * EVERY
