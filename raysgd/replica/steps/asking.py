"""Ask the driver between two batches whether to make a checkpoint. Worker."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from raysgd.core.measures.metrics import Measured, numbers
from raysgd.core.measures.progress import Progress

logger = logging.getLogger("raysgd")


class NoDriver(ConnectionError):
    """The driver does not answer, for example because it has ended."""


@dataclass(frozen=True)
class Question:
    """What each rank asks the driver between two batches: whether to make a checkpoint. `measured`
    is what it has measured since this part of the call began."""

    rank: int
    progress: Progress
    measured: Measured


@dataclass(frozen=True)
class Reply:
    """The same for all ranks: after which `step` they ask again, and the arguments of `save`, if
    they make a checkpoint."""

    step: float
    arguments: Mapping[str, Any] | None = None


class Asking:
    """Owns after which `step` this rank asks the driver whether to make a checkpoint. All ranks
    have then committed the same steps, and no one begins another one before it has the answer."""

    def __init__(self, replica: Any, save: Callable[..., Any], *, transfer: str, step: float) -> None:
        self._replica, self._save, self._transfer, self.step = replica, save, transfer, step

    def ask(self) -> None:
        """Make a checkpoint now, if the driver wants one: copy the state, and write it in a
        thread."""
        replica = self._replica
        measured = replica.partial()
        measured = Measured(numbers(measured.metrics), measured.committed, measured.drawn)
        question = Question(replica.rank, replica.progress, measured)
        try:
            try:
                reply: Reply = replica.control.ask(self._transfer, question)
            except OSError as error:
                raise NoDriver(str(error)) from error
            if reply.arguments is not None:
                replica.share()
                self._save(replica, **reply.arguments)
        except NoDriver as error:
            if replica.saves_together:
                raise  # the other ranks may be waiting for what this one adds
            logger.info("no checkpoint is made until workers change, because the driver does not answer: %s", error)
            reply = Reply(math.inf)
        self.step = reply.step
