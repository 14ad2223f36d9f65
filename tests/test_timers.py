"""Timers: statistics over a window, and a switch for all of them."""

from __future__ import annotations

import math
import time

import pytest

from raysgd.core.timers import TimerCollection, TimerStat


def pushed(*seconds: float, window_size: int = 10) -> TimerStat:
    timer = TimerStat(window_size=window_size)
    for value in seconds:
        timer.push(value)
    return timer


@pytest.mark.parametrize(
    ("name", "value"),
    [("mean", 2.5), ("median", 2.0), ("sum", 10.0), ("max", 5.0), ("first", 2.0), ("last", 1.0), ("size", 4)],
)
def test_statistics(name, value):
    assert getattr(pushed(2.0, 5.0, 2.0, 1.0), name) == value


@pytest.mark.parametrize(
    ("name", "value"),
    [("sum", 0.0), ("first", None), ("last", None), ("size", 0), ("mean_throughput", 0.0)],
)
def test_statistics_without_runs(name, value):
    assert getattr(TimerStat(), name) == value


@pytest.mark.parametrize("name", ["mean", "median", "max", "mean_units_processed"])
def test_means_without_runs_are_nan(name):
    assert math.isnan(getattr(TimerStat(), name))


def test_the_window_forgets_the_oldest():
    timer = pushed(100.0, 1.0, 3.0, window_size=2)
    assert (timer.size, timer.first, timer.mean) == (2, 1.0, 2.0)


@pytest.mark.parametrize("size", [0, -1])
def test_the_window_size_is_checked(size):
    with pytest.raises(ValueError, match=f"at least 1, got {size}"):
        TimerStat(window_size=size)


def test_throughput_is_units_over_seconds():
    timer = pushed(1.0, 3.0)
    timer.push_units_processed(10)
    timer.push_units_processed(30)
    assert timer.mean_units_processed == 20
    assert timer.mean_throughput == 10


def test_a_block_is_measured_also_if_it_raises_an_error():
    timer = TimerStat()
    with pytest.raises(KeyError), timer:
        time.sleep(0.02)
        raise KeyError
    assert timer.size == 1
    assert 0.015 < timer.last < 5
    with timer:
        pass
    assert timer.size == 2


def test_a_running_timer_refuses_a_nested_block():
    timer = TimerStat()
    with timer, pytest.raises(RuntimeError, match="already running"), timer:
        pass
    assert timer.size == 1


def test_reset_forgets_all_runs():
    timer = pushed(1.0)
    timer.push_units_processed(4)
    timer.reset()
    assert (timer.size, timer.last) == (0, None)
    assert math.isnan(timer.mean_units_processed)


def test_stats_name_mean_and_last():
    timers = TimerCollection()
    for seconds in (1.0, 3.0):
        timers.record("fwd").push(seconds)
    timers.record("never ran")
    assert timers.stats() == {"mean_fwd_s": 2.0}
    assert timers.stats(last=True) == {"mean_fwd_s": 2.0, "last_fwd_s": 3.0}
    assert timers.stats(mean=False, last=True) == {"last_fwd_s": 3.0}
    timers.reset()
    assert timers.stats(last=True) == {}


def test_nothing_is_recorded_while_disabled():
    timers = TimerCollection()
    timers.disable()
    with timers.record("fwd"), timers.record("fwd"):
        pass
    assert timers.stats() == {}
    timers.enable()
    with timers.record("fwd"):
        pass
    assert list(timers.stats()) == ["mean_fwd_s"]


def test_laps_divide_a_block_into_its_parts(monkeypatch):
    now = iter([1.0, 1.5, 3.5])
    monkeypatch.setattr("raysgd.core.timers.time.perf_counter", lambda: next(now))
    timers = TimerCollection()
    lap = timers.laps()
    lap("fwd")
    lap("grad")
    assert timers.stats() == {"mean_fwd_s": 0.5, "mean_grad_s": 2.0}


def test_laps_of_timers_that_are_off_record_nothing():
    timers = TimerCollection()
    timers.disable()
    timers.laps()("fwd")
    assert timers.stats() == {}
