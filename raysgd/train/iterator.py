"""A run that the user walks through, one round of reports at a time."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from typing import Any

from raysgd.train.callbacks import Callbacks
from raysgd.train.executor import BackendExecutor
from raysgd.train.run import Told

__all__ = ["SGDIterator", "TrainingIterator"]

logger = logging.getLogger("raysgd")


class TrainingIterator:
    """Yields what all ranks reported in each round: a list of dicts. The function runs on, whether or not one looks."""

    def __init__(self, executor: BackendExecutor) -> None:
        self._executor = executor
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
            told = self._executor.fetch_next_round()
            if told is not None:
                return told
            self._results = self._executor.finish_training()
        except KeyboardInterrupt as interrupt:
            self._finished = True
            self._executor.cancel(interrupt)
            raise
        except BaseException:
            self._finished = True
            raise
        self._finished = True
        return None

    def heard_by(self, callbacks: Callbacks, logdir: str) -> Generator[Told, None, None]:
        """Round by round, each after the callbacks have heard it. Whoever stops in the middle stops the function."""
        failed = True
        try:
            callbacks.start_training(logdir)
            while (told := self.next_round()) is not None:
                callbacks.handle_result(told.rows)
                yield told
            failed = False
        finally:
            if failed and not self._finished:
                self._executor.cancel(KeyboardInterrupt())
            callbacks.finish_training(error=failed)

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
