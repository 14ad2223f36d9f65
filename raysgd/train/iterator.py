"""A run that the user walks through, one round of reports at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import Any

from raysgd.callbacks.base import Run
from raysgd.train.callbacks import RunCallbacks, without_traces
from raysgd.train.executor import BackendExecutor
from raysgd.train.run import Told

__all__ = ["SGDIterator", "TrainingIterator"]

logger = logging.getLogger("raysgd")


class TrainingIterator:
    """Yields what all ranks reported in each round: a list of dicts. The function runs on, whether or not one looks."""

    def __init__(
        self,
        executor: BackendExecutor,
        callbacks: RunCallbacks | None = None,
        *,
        record: Callable[[Told], None] = lambda told: None,
    ) -> None:
        """`record` gets every round that was complete, before callbacks hear of it, and also when the run was stopped."""
        self._executor, self._callbacks, self._record = executor, callbacks or RunCallbacks(None), record
        self._finished = False
        self._results: list[Any] | None = None

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        return self

    def __next__(self) -> list[dict[str, Any]]:
        told = self.next_round()
        if told is None:
            raise StopIteration
        return told.rows

    def next_round(self) -> Told | None:
        """The same, with the number of the newest checkpoint at that time; None at the end."""
        if self._finished:
            return None
        try:
            told = self._executor.fetch_next_round(self._look)
            if told is not None:
                shown = replace(told, rows=without_traces(told.rows))
                self._record(shown)
                self._callbacks.handle_result(told.rows)
                return shown
            self._results = self._executor.finish_training()
        except BaseException as error:  # the function's; or Ctrl-C, or a callback that wants to stop while it runs
            self._stop(error)
            if isinstance(error, StopIteration):  # it would end a loop over the rounds as if the function had finished
                raise RuntimeError("the training function raised StopIteration") from error
            raise
        self._finished = True
        return None

    def heard(self, run: Run, begin: Callable[[Callable[[], None]], None]) -> Generator[Told, None, None]:
        """Round by round, with the callbacks told of the run's start and end. Whoever stops in the middle stops the
        function. `begin` begins it, and before that calls what it is given: so callbacks hear of the start first."""
        error: BaseException | None = None
        told_start = False

        def ready() -> None:
            nonlocal told_start
            told_start = True
            self._callbacks.start_training(run)

        try:
            begin(ready)
            while (told := self.next_round()) is not None:
                yield told
            self._look()
        except BaseException as raised:
            error = raised
            raise
        finally:
            if error is not None and not self._finished and told_start:
                self._stop(error)
            if told_start:
                self._callbacks.finish_training(error)

    def _stop(self, error: BaseException) -> None:
        self._finished = True
        self._executor.cancel(error if isinstance(error, Exception) else KeyboardInterrupt())
        for told in self._executor.unfetched_rounds():
            self._record(replace(told, rows=without_traces(told.rows)))

    def _look(self) -> None:
        """While we wait for a round: have workers been lost, or come?"""
        if self._executor.is_started:
            self._callbacks.handle_recoveries(self._executor.recoveries_of_run)

    def is_finished(self) -> bool:
        """Have all rounds been fetched, and has the function ended?"""
        return self._finished

    def get_final_results(self, force: bool = False) -> list[Any] | None:
        """What each rank returned. Before the end None; with `force` it waits, and drops what is still reported."""
        if not self._finished and force:
            for _ in self:
                pass
        if not self._finished:
            logger.info("the function still runs: iterate to its end, or call get_final_results(force=True)")
        return self._results


SGDIterator = TrainingIterator
