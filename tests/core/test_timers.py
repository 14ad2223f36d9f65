"""Timers: means over the newest runs, and a switch for all of them."""

import pytest

from raysgd.core.measures.timers import Timers


def test_the_mean_is_that_of_the_newest_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 100.0, *(each for start in range(200, 210) for each in (start, start + 0.5))])
    monkeypatch.setattr("raysgd.core.measures.timers.time.perf_counter", lambda: next(now))
    timers = Timers()
    for _ in range(11):
        with timers.record("fwd"):
            pass
    assert timers.stats() == {"mean_fwd_s": 0.5}
    timers.reset()
    assert timers.stats() == {}


def test_nothing_is_recorded_while_disabled() -> None:
    timers = Timers()
    timers.enabled = False
    with timers.record("fwd"), timers.record("fwd"):
        pass
    assert timers.stats() == {}
    timers.enabled = True
    with timers.record("fwd"):
        pass
    assert list(timers.stats()) == ["mean_fwd_s"]


def test_laps_divide_a_block_into_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([1.0, 1.5, 3.5])
    monkeypatch.setattr("raysgd.core.measures.timers.time.perf_counter", lambda: next(now))
    timers = Timers()
    lap = timers.laps()
    lap("fwd")
    lap("grad")
    assert timers.stats() == {"mean_fwd_s": 0.5, "mean_grad_s": 2.0}
