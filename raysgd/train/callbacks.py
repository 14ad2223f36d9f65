"""What a function trainer tells while it runs, and how an error in a listener is kept from the training."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from raysgd.errors import ConfigError

__all__ = ["Callbacks", "TrainingCallback"]

logger = logging.getLogger("raysgd")


class TrainingCallback:
    """Override what you need; all three are called on the driver."""

    def start_training(self, logdir: str) -> None:
        """Before the function runs; `logdir` is the run's directory."""

    def handle_result(self, results: list[dict[str, Any]]) -> None:
        """After each round of reports: one dict per rank, in rank order."""

    def finish_training(self, error: bool = False) -> None:
        """At the end, always; `error` says whether the run failed."""


class Callbacks:
    """Tells several callbacks. One that raises is reported in the log, and does not stop the training."""

    def __init__(self, callbacks: Iterable[Any] | None) -> None:
        self._all = list(callbacks or [])
        for callback in self._all:
            if not all(callable(getattr(callback, name, None)) for name in ("start_training", "handle_result")):
                raise ConfigError(f"callbacks must be TrainingCallback objects, got {callback!r}")

    def start_training(self, logdir: str) -> None:
        self._tell("start_training", logdir=logdir)

    def handle_result(self, results: list[dict[str, Any]]) -> None:
        for callback in self._all:
            self._one(callback, "handle_result", results)

    def finish_training(self, *, error: bool) -> None:
        self._tell("finish_training", error=error)

    def _tell(self, hook: str, **given: Any) -> None:
        for callback in self._all:
            self._one(callback, hook, **given)

    @staticmethod
    def _one(callback: Any, hook: str, *positional: Any, **given: Any) -> None:
        try:
            getattr(callback, hook)(*positional, **given)
        except Exception:
            logger.exception("%s.%s raised; training goes on", type(callback).__name__, hook)
