"""Follows a run of a training function, round by round, and calls the callbacks. Driver."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from raysgd.callbacks.base import TRACES, CallResult, Run
from raysgd.callbacks.callback_list import CallbackList
from raysgd.core.metrics import plain
from raysgd.train.executor import BackendExecutor
from raysgd.train.run import RoundResult
from raysgd.workers.tracebacks import folding

logger = logging.getLogger("raysgd")


class TrainingIterator:
    """Yields what all ranks reported in each round: a list of dicts. The function does not wait for
    that."""

    def __init__(
        self,
        executor: BackendExecutor,
        callbacks: CallbackList | None = None,
        *,
        record: Callable[[RoundResult], None] = lambda result: None,
    ) -> None:
        """`record` gets every complete round, before the callbacks do, even at a stop."""
        self._executor, self._callbacks, self._record = executor, callbacks or CallbackList([]), record
        self._finished = False
        self._rounds = self._recoveries = 0
        self._results: list[Any] | None = None

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        return self

    @folding
    def __next__(self) -> list[dict[str, Any]]:
        result = self.next_round()
        if result is None:
            raise StopIteration
        return result.rows

    def next_round(self) -> RoundResult | None:
        """Wait for the next round, and return it with the number of the newest checkpoint at that
        time. Return None when the function has ended."""
        if self._finished:
            return None
        try:
            while (result := self._executor.fetch_next_round(self._report_recoveries)) is not None:
                visible = _without_traces(result)
                self._record(visible)
                if result.complete:
                    self._report_round(result.rows, visible.rows)
                    return visible
            self._results = self._executor.finish_training()
        except BaseException as error:  # of the function, of a callback that stops training, or Ctrl-C
            self._stop(error)
            if isinstance(error, StopIteration):  # would end a loop over the rounds as if the function had finished
                raise RuntimeError("the training function raised StopIteration") from error
            raise
        self._finished = True
        return None

    def run_to_end(self, run: Run, begin: Callable[[Callable[[], None]], None]) -> list[Any]:
        """Start the function, follow it to its end, and return what each rank returned. `begin`
        starts it, and before that calls its argument, which announces the run to the callbacks."""
        started = False

        def ready() -> None:
            nonlocal started
            started = True
            self._callbacks.start(run)
            self._callbacks.raise_stop()

        try:
            begin(ready)
            while self.next_round() is not None:
                pass
            self._report_recoveries()
        except BaseException as error:
            if started:
                if not self._finished:
                    self._stop(error)
                self._callbacks.error(error)
                self._callbacks.end(failed=True)
            raise
        self._callbacks.end(failed=False)
        assert self._results is not None
        return self._results

    def _stop(self, error: BaseException) -> None:
        self._finished = True
        self._executor.cancel(error if isinstance(error, Exception) else KeyboardInterrupt())
        for result in self._executor.unfetched_rounds():
            self._record(_without_traces(result))

    def _report_round(self, reported: list[dict[str, Any]], visible: list[dict[str, Any]]) -> None:
        self._rounds += 1
        rows = [{name: plain(value) for name, value in row.items()} for row in visible]
        first = rows[0] if rows else {}
        epoch = first.get("epoch")
        result = CallResult(
            kind="report",
            epoch=epoch if isinstance(epoch, int) else None,
            step=int(_finite(first.get("_training_iteration"), self._rounds)),
            metrics=first,
            by_worker=rows,
            world_size=len(rows),
            seconds=float(_finite(first.get("_time_this_iter_s"), 0.0)),
            traces=[row.get(TRACES, {}) for row in reported],
        )
        self._callbacks.result(result)
        self._callbacks.raise_stop()

    def _report_recoveries(self) -> None:
        """Call the callbacks with the recoveries since the last time."""
        if self._executor.is_started:
            for recovery in self._executor.recoveries_of_run[self._recoveries :]:
                self._recoveries += 1
                self._callbacks.recovery(recovery)
            self._callbacks.raise_stop()

    def is_finished(self) -> bool:
        """Return whether all rounds were fetched and the function has ended."""
        return self._finished

    @folding
    def get_final_results(self, force: bool = False) -> list[Any] | None:
        """Return what each rank returned, or None before the end. With `force`, wait for the end,
        and discard what the function still reports."""
        if not self._finished and force:
            for _ in self:
                pass
        if not self._finished:
            logger.info("the function is still running: iterate to its end, or call get_final_results(force=True)")
        return self._results


SGDIterator = TrainingIterator


def _without_traces(result: RoundResult) -> RoundResult:
    """Remove profiler traces, which only the profiler's callback gets."""
    return replace(result, rows=[{name: row[name] for name in row if name != TRACES} for row in result.rows])


def _finite(value: Any, default: float) -> float:
    """Return raysgd's own number in a report, unless the function reported something else there."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else default
