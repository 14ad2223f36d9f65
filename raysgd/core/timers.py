"""Measure how long the parts of a training step take. Standard library only. Both."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType


class TimerStat:
    """Measures the durations of the last `window_size` runs of a `with` block. Only one thread at a time may use it.

    timer = TimerStat()
    with timer:
        batch = next(batches)
        timer.push_units_processed(len(batch))
    timer.mean, timer.mean_throughput
    """

    def __init__(self, window_size: int = 10) -> None:
        if window_size < 1:
            raise ValueError(f"window_size, the number of runs to remember, must be at least 1, got {window_size!r}")
        self._samples: deque[float] = deque(maxlen=window_size)
        self._units: deque[float] = deque(maxlen=window_size)
        self._started_at: float | None = None

    def __enter__(self) -> TimerStat:
        if self._started_at is not None:
            raise RuntimeError("this timer is already running; use a second TimerStat for a nested block")
        self._started_at = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._started_at is not None:
            self.push(time.perf_counter() - self._started_at)
            self._started_at = None

    def push(self, time_delta: float) -> None:
        """Add a duration in seconds that was measured elsewhere."""
        self._samples.append(time_delta)

    def push_units_processed(self, n: float) -> None:
        """Record how much work one run did."""
        self._units.append(n)

    def reset(self) -> None:
        """Forget all runs that have ended. A run that has not ended yet still counts."""
        self._samples.clear()
        self._units.clear()

    @property
    def mean(self) -> float:
        return statistics.fmean(self._samples) if self._samples else math.nan

    @property
    def median(self) -> float:
        return statistics.median(self._samples) if self._samples else math.nan

    @property
    def sum(self) -> float:
        return math.fsum(self._samples)

    @property
    def max(self) -> float:
        return max(self._samples, default=math.nan)

    @property
    def first(self) -> float | None:
        """Return the oldest duration in the window, or None if there is none."""
        return self._samples[0] if self._samples else None

    @property
    def last(self) -> float | None:
        """Return the newest duration, or None if there is none."""
        return self._samples[-1] if self._samples else None

    @property
    def size(self) -> int:
        return len(self._samples)

    @property
    def mean_units_processed(self) -> float:
        return statistics.fmean(self._units) if self._units else math.nan

    @property
    def mean_throughput(self) -> float:
        """Return the units per second over the window, 0 if no time was measured."""
        seconds = self.sum
        return math.fsum(self._units) / seconds if seconds else 0.0


_NOTHING: AbstractContextManager[None] = nullcontext()


def _no_lap(key: str) -> None:
    """Do nothing, because the timers are off."""


class TimerCollection:
    """Owns timers by name, which can be switched off together: `record` then returns a context that does nothing."""

    def __init__(self) -> None:
        self._timers: dict[str, TimerStat] = {}
        self._enabled = True

    @property
    def enabled(self) -> bool:
        return self._enabled

    def enable(self) -> None:
        self._enabled = True

    def disable(self) -> None:
        self._enabled = False

    def reset(self) -> None:
        for timer in self._timers.values():
            timer.reset()

    def record(self, key: str) -> AbstractContextManager[TimerStat | None]:
        """Return the context to time a block with: `with timers.record("fwd"): ...`."""
        if not self._enabled:
            return _NOTHING
        if key not in self._timers:
            self._timers[key] = TimerStat()
        return self._timers[key]

    def laps(self) -> Callable[[str], None]:
        """Return a function to call after each part of a block that runs often, with the part's name: it records the time since its
        last call. It costs one call for each part if the timers are off, where `record` costs three."""
        if not self._enabled:
            return _no_lap
        began = time.perf_counter()

        def lap(key: str) -> None:
            nonlocal began
            now = time.perf_counter()
            self._timers.setdefault(key, TimerStat()).push(now - began)
            began = now

        return lap

    def stats(self, mean: bool = True, last: bool = False) -> dict[str, float]:
        """Return `mean_<key>_s`, and `last_<key>_s` if `last` is set, of each timer that ran since the last reset."""
        result: dict[str, float] = {}
        for key, timer in self._timers.items():
            if mean and timer.last is not None:
                result[f"mean_{key}_s"] = timer.mean
            if last and timer.last is not None:
                result[f"last_{key}_s"] = timer.last
        return result
