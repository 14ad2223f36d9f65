"""Keep what a report shows and the rows of a history lack: times, recoveries, the pace, each rank's seconds. Driver."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from raysgd.callbacks.base import CallResult, Run, Underway
from raysgd.core.metrics import SECONDS
from raysgd.core.policy import Recovery

__all__ = ["Timeline"]

MOST_POINTS = 1000
FIRST_INTERVAL_S = 0.5


class Timeline:
    """Owns what happened in this process, with the times, in seconds since 1970.

    run         the newest run; None before the first one
    results     each result's row in the history, and when it came
    recoveries  every change of the workers
    pace        points (time, seconds of training, batches trained), the two counted since the start: at most MOST_POINTS of
                them, at equal intervals, which double when there would be more
    ranks       of each rank, in the results of `train` since the last change of the workers: batches, and the seconds that
                `Throughput` measures
    """

    def __init__(self) -> None:
        self.run: Run | None = None
        self.results: list[tuple[float, Mapping[str, Any]]] = []
        self.recoveries: list[Recovery] = []
        self.pace: list[tuple[float, float, int]] = []
        self.ranks: list[dict[str, float]] = []
        self._interval_s = FIRST_INTERVAL_S
        self._next = -math.inf
        self._began = self._trained_s = 0.0
        self._batches = 0

    def see_progress(self, now: Underway) -> None:
        clock = time.monotonic()
        if now.kind != "train":
            return
        if not now.worker:
            self._began = clock
            if not self.pace:
                self._add_point(clock, 0.0, 0)
        elif clock >= self._next:
            self._add_point(clock, clock - self._began, now.progress.batches)

    def _add_point(self, clock: float, seconds: float, batches: int) -> None:
        self._next = clock + self._interval_s
        self.pace.append((time.time(), self._trained_s + seconds, self._batches + batches))
        if len(self.pace) > MOST_POINTS:
            del self.pace[1::2]
            self._interval_s *= 2

    def see_result(self, result: CallResult, row: Mapping[str, Any]) -> None:
        self.results.append((time.time(), row))
        if result.kind != "train":
            return
        self._trained_s += result.seconds
        self._batches += int(_number(result.metrics, "batch_count"))
        if (clock := time.monotonic()) >= self._next:
            self._add_point(clock, 0.0, 0)
        if len(result.by_worker) == result.world_size:  # otherwise the workers changed in the call
            self.ranks = self.ranks if len(self.ranks) == result.world_size else [{} for _ in result.by_worker]
            for sums, row in zip(self.ranks, result.by_worker, strict=True):
                for name in ("batch_count", *SECONDS.values()):
                    if name in row:
                        sums[name] = sums.get(name, 0.0) + _number(row, name)

    def see_recovery(self, recovery: Recovery) -> None:
        self.recoveries.append(recovery)
        self.ranks = []


def _number(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0
