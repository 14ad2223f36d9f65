"""Several callbacks, told as one. What goes wrong in one of them stays there, unless it asks for more."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

from raysgd.callbacks.base import Callback, Result, Run, Underway
from raysgd.errors import ConfigError
from raysgd.policy import Recovery

__all__ = ["CallbackList", "check_callbacks"]

logger = logging.getLogger("raysgd")


class CallbackList:
    """Owns the callbacks of one trainer, in their order, and the error of one that wants training to stop.

    `raise_stop` raises that error: at a place where the trainer can be left, which is not where it happened.
    """

    def __init__(self, callbacks: Iterable[Callback]) -> None:
        self._all = list(callbacks)
        self._failures: Counter[str] = Counter()
        self._stop: Exception | None = None

    @property
    def on_workers(self) -> list[Any]:
        """What the callbacks want of the workers."""
        return [callback.on_workers for callback in self._all if callback.on_workers is not None]

    def start(self, run: Run) -> None:
        self._tell("on_start", run)

    def progress(self, now: Underway) -> None:
        self._tell("on_progress", now)

    def result(self, result: Result) -> None:
        self._tell("on_result", result)

    def recovery(self, recovery: Recovery) -> None:
        self._tell("on_recovery", recovery)

    def error(self, error: BaseException) -> None:
        """This one is what the caller gets, whatever callbacks have asked for."""
        self._tell("on_error", error)
        self._forget_stop()

    def end(self, *, failed: bool) -> None:
        """There is nothing more to be stopped."""
        self._tell("on_end", failed)
        self._forget_stop()
        for name, count in self._failures.items():
            if count > 1:
                logger.error("%s raised %d times; the first is above", name, count)
        self._failures.clear()

    def raise_stop(self) -> None:
        stop, self._stop = self._stop, None
        if stop is not None:
            raise stop

    def _tell(self, hook: str, told: Any) -> None:
        for callback in self._all:
            try:
                getattr(callback, hook)(told)
            except Exception as error:
                self._failed(callback, hook, error)

    def _forget_stop(self) -> None:
        stop, self._stop = self._stop, None
        if stop is not None:
            logger.error("a callback that stops training raised, where nothing can be stopped any more", exc_info=stop)

    def _failed(self, callback: Callback, hook: str, error: Exception) -> None:
        if callback.stops_training and self._stop is None:
            self._stop = error
            return
        name = f"{type(callback).__name__}.{hook}"
        self._failures[name] += 1
        if self._failures[name] == 1:
            logger.error("the callback %s raised; training goes on", name, exc_info=error)


def check_callbacks(callbacks: Any) -> list[Callback]:
    """What a trainer was given as `callbacks`."""
    if callbacks is None:
        return []
    if isinstance(callbacks, Callback) or not isinstance(callbacks, Iterable):
        raise ConfigError(f"callbacks must be a list of raysgd.callbacks.Callback objects, got {callbacks!r}")
    found = list(callbacks)
    for each in found:
        if isinstance(each, type):
            raise ConfigError(f"callbacks must be objects, got the class {each.__name__}: write {each.__name__}()")
        if not isinstance(each, Callback):
            raise ConfigError(f"callbacks must be Callback objects (or TrainingCallback, as in v1), got {each!r}")
    return found
