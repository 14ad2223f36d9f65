"""What a set of outcomes means, and what to do about it, as tables, because both functions are pure."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysgd.core.decisions.policy import (
    GiveUp,
    Rejoin,
    Restart,
    Situation,
    Wait,
    backoff,
    classify,
    count_to_launch,
    decide,
    is_time_to_join,
    is_time_to_leave,
    leave_within_s,
)
from raysgd.core.outcomes import CollectiveCalls, Failed, Interrupted, Ok, WorkerFailed

OK, PAUSED = Ok(1), Interrupted(asked=True)
CUT = Interrupted(cause="RuntimeError: Connection closed by peer")
FAILED, HANGS, ERROR = WorkerFailed("it ended"), WorkerFailed("stopped", "hang"), Failed(ValueError("mine"))

OUTCOMES = {
    "all finished": ([OK, OK], "done", ""),
    "one failed, one interrupted": ([CUT, FAILED], "broken", "worker death"),
    "one failed, one finished": ([OK, FAILED], "broken", "worker death"),
    "all failed": ([FAILED, FAILED], "broken", "worker death"),
    "one hangs": ([CUT, HANGS], "broken", "hang"),
    "all interrupted, none failed": ([CUT, CUT], "broken", "network"),
    "one interrupted, one finished": ([OK, CUT], "broken", "network"),
    "all stopped as asked": ([PAUSED, PAUSED], "paused", ""),
    "one finished before the boundary": ([OK, PAUSED], "paused", ""),
    "a failure while stopping": ([PAUSED, FAILED], "broken", "worker death"),
    "an error, and interrupted peers": ([CUT, ERROR, CUT], "user_error", ""),
    "an error and a failure": ([FAILED, ERROR], "user_error", ""),
}


@pytest.mark.parametrize(("outcomes", "kind", "reason"), OUTCOMES.values(), ids=OUTCOMES)
def test_classification(outcomes: list, kind: str, reason: str) -> None:
    named = {f"w{rank}": outcome for rank, outcome in enumerate(outcomes)}
    seen = classify(named)
    assert (seen.kind, seen.reason) == (kind, reason)
    if kind == "user_error":
        assert isinstance(named[seen.culprit], Failed)


def situation(**facts: object) -> Situation:
    usual = dict(
        survivors=2, ready=0, starting=0, free=0, target=3, min_workers=1,
        failures=1, max_failures=3, attempts=0, max_attempts=10, gathered=True,
    )  # fmt: skip
    return Situation(**{**usual, **facts})


DECISIONS = {
    "survivors continue at once": (dict(), Rejoin()),
    "too many failures": (dict(failures=4), GiveUp),
    "no limit": (dict(failures=1000, max_failures=-1), Rejoin()),
    "none left, room for all": (dict(survivors=0, free=5), Restart(3)),
    "none left, one is starting, room for more": (dict(survivors=0, starting=1, free=5), Restart(2)),
    "none left, one is starting and may still need the room": (dict(survivors=0, starting=1, free=1), Wait(7.0)),
    "some are left, one is starting": (dict(survivors=1, min_workers=2, starting=1, free=5), Wait(7.0)),
    "none left, no room": (dict(survivors=0), Wait(7.0)),
    "none left, replacements are starting": (dict(survivors=0, starting=3), Wait(7.0)),
    "none left, the first of several is ready": (dict(survivors=0, ready=1, starting=2, gathered=False), Wait(7.0)),
    "none left, all are ready": (dict(survivors=0, ready=3), Rejoin()),
    "fewer than min_workers, room": (dict(survivors=1, min_workers=2, free=1), Restart(1)),
    "fewer than min_workers, no room": (dict(survivors=1, min_workers=2), Wait(7.0)),
    "fewer than min_workers, one is ready": (dict(survivors=1, min_workers=2, ready=1), Rejoin()),
    "room for too few": (dict(survivors=0, min_workers=3, free=2), Wait(7.0)),
    "waited often enough": (dict(survivors=0, attempts=10), GiveUp),
    "waited often, but one is starting": (dict(survivors=0, attempts=10, starting=1), Wait(7.0)),
}


@pytest.mark.parametrize(("facts", "expected"), DECISIONS.values(), ids=DECISIONS)
def test_decisions(facts: dict, expected: object) -> None:
    decision = decide(situation(**facts), wait_s=7.0)
    if isinstance(expected, type):
        assert isinstance(decision, expected)
    else:
        assert decision == expected


def test_code_that_hangs_again_at_the_same_place_is_given_up_whatever_the_limit_on_failures() -> None:
    assert decide(situation(hangs=1, failures=1, max_failures=-1), wait_s=1) == Rejoin()
    decision = decide(situation(hangs=2, failures=2, max_failures=-1), wait_s=1)
    assert isinstance(decision, GiveUp) and "hung 2 times in a row" in decision.why


def test_backoff_doubles_up_to_its_limit() -> None:
    assert [backoff(attempt, 1.0, 10.0, jitter=0.0) for attempt in range(6)] == [1, 2, 4, 8, 10, 10]


def test_jitter_shortens_the_pause_by_up_to_half() -> None:
    waits = {backoff(3, 1.0, 60.0, jitter=jitter) for jitter in (0.0, 0.5, 0.999)}
    assert max(waits) == 8 and min(waits) > 4 and len(waits) == 3


def test_giving_up_has_the_reason() -> None:
    decision = decide(situation(survivors=1, min_workers=3, attempts=10), wait_s=1)
    assert isinstance(decision, GiveUp)
    assert all(word in decision.why for word in ("10 waits", "min_workers=3", "1 worker is available"))


def cut(call: int = -1, *steps: tuple[int, int]) -> Interrupted:
    return Interrupted(cause="RuntimeError: Timed out", collectives=CollectiveCalls(call, steps))


DIFFERENT = {
    "a call beyond the last one of a rank that has finished": [Ok(1, collectives=13), cut(14)],
    "one received data of another size": [WorkerFailed("preamble", "out of step"), cut(9)],
    "one call too many before": [cut(15, (7, 12), (8, 14)), cut(16, (8, 15), (9, 16))],
    "the same, and another one died": [cut(15, (7, 12), (8, 14)), cut(16, (8, 15), (9, 16)), FAILED],
    "in a call of a step that the other one has ended": [cut(9, (7, 12), (8, 14), (9, 8)), cut(9, (7, 12), (8, 14))],
}
SAME = {
    "the same call": [cut(9), cut(9)],
    "one is a call ahead": [cut(9), cut(10)],
    "the same numbers before each step": [cut(15, (7, 12), (8, 14)), cut(17, (8, 14), (9, 16))],
    "no step in common": [cut(13, (7, 12)), cut(15, (8, 14))],
    "code that has made another call after the failure": [cut(14, (7, 12), (8, 14)), cut(-1, (7, 12))],
    "one has finished, and the other is in its last call": [Ok(1, collectives=13), cut(13)],
    "one has finished, and the other one is stopped": [Ok(1, collectives=13), replace(cut(14), asked=True)],
    "a backend that does not count": [Ok(1), cut(-1), cut(-1)],
    "a failure": [cut(9), FAILED],
    "stopped as asked": [PAUSED, PAUSED],
}


@pytest.mark.parametrize("outcomes", DIFFERENT.values(), ids=DIFFERENT)
def test_ranks_that_made_different_collective_calls(outcomes: list) -> None:
    seen = classify({f"w{rank}": outcome for rank, outcome in enumerate(outcomes)})
    assert (seen.kind, seen.reason) == ("out_of_step", "out of step") and "rank 0" in seen.detail


@pytest.mark.parametrize("outcomes", SAME.values(), ids=SAME)
def test_ranks_that_may_have_made_the_same_calls(outcomes: list) -> None:
    assert classify({f"w{rank}": outcome for rank, outcome in enumerate(outcomes)}).kind in ("broken", "paused")


@settings(deadline=None)
@given(
    st.permutations(
        [
            Ok(1, collectives=9),
            Ok(1),
            cut(10),
            cut(8),
            FAILED,
            ERROR,
            PAUSED,
            CUT,
            WorkerFailed("x", "out of step"),
        ]
    ),
    st.integers(1, 9),
)
def test_a_users_error_takes_precedence(outcomes: list, count: int) -> None:
    named = {f"w{rank}": outcome for rank, outcome in enumerate(outcomes[:count])}
    assert (classify(named).kind == "user_error") == any(isinstance(o, Failed) for o in named.values())


@settings(deadline=None)
@given(st.integers(-2, 5), *(st.integers(0, 5) for _ in range(4)))
def test_spares_are_started_only_where_nothing_else_needs_the_room(
    missing: int, spares: int, ready: int, starting: int, room: int
) -> None:
    facts = {"missing": missing, "ready": ready, "starting": starting, "room": room}
    without, count = count_to_launch(**facts, spares=0), count_to_launch(**facts, spares=spares)
    assert 0 <= without <= count <= room
    assert count + ready + starting <= max(missing, 0) + spares or count == 0
    assert count == room or count + ready + starting >= max(missing, 0) + spares


LEAVING = {
    "there is no room for a replacement": (dict(), True),
    "the replacement is starting": (dict(starting=1), False),
    "the replacement is ready": (dict(ready=1), True),
    "a spare is ready, and its own replacement is starting": (dict(ready=1, starting=1), True),
    "two leave, and one replacement is ready": (dict(missing=2, ready=1, starting=1), False),
    "two leave, and there is room for one only": (dict(missing=2, ready=1), True),
    "the deadline is near": (dict(starting=1, left_s=0.0), True),
    "replacements join between calls only": (dict(starting=1, grows=False), True),
    "fewer than min_workers would be left": (dict(enough=False), False),
    "the same, between calls": (dict(grows=False, enough=False), False),
    "the same, and the deadline is near": (dict(enough=False, left_s=0.0), True),
}


@pytest.mark.parametrize(("facts", "leaves"), LEAVING.values(), ids=LEAVING)
def test_when_a_preempted_worker_leaves(facts: dict, leaves: bool) -> None:
    usual = dict(missing=1, ready=0, starting=0, left_s=20.0, grows=True)
    assert is_time_to_leave(**{**usual, **facts}) is leaves


def test_a_worker_leaves_before_its_machine_does() -> None:
    assert (leave_within_s(120.0), leave_within_s(None), leave_within_s(3.0)) == (110.0, 20.0, -7.0)


JOINING = {
    "nothing is missing, and a spare is ready": (dict(missing=0, ready=1), False),
    "the only missing one is ready": (dict(ready=1), True),
    "it is ready, and a spare is starting": (dict(ready=1, starting=1), True),
    "one of two is ready": (dict(missing=2, ready=1, starting=1), False),
    "one of two has waited for long enough": (dict(missing=2, ready=1, starting=1, waited_s=4.0), True),
    "one of two is ready, and there is no room for the other": (dict(missing=2, ready=1), True),
    "none is ready": (dict(starting=1), False),
}


@pytest.mark.parametrize(("facts", "joins"), JOINING.values(), ids=JOINING)
def test_when_ready_workers_join(facts: dict, joins: bool) -> None:
    usual = dict(missing=1, ready=0, starting=0, waited_s=0.0, patience_s=3.0)
    assert is_time_to_join(**{**usual, **facts}) is joins
