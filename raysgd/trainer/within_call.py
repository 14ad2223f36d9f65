"""Decide after which batches of a call of `train` the ranks make automatic checkpoints. Driver.

Nothing stops for them. All ranks ask between the same two batches, and all get the same reply: with
the arguments of a save, if a checkpoint is due and the one before it is written, and with the next
step after which they ask. With a number of batches, these are its multiples. Seconds are converted
to batches, at the speed of the last ones.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raysgd.core.measures.metrics import Measured, merge_measured
from raysgd.core.measures.progress import Progress
from raysgd.replica.steps.asking import Question, Reply

logger = logging.getLogger("raysgd")

# Begins a checkpoint of the state after this progress; `contents` waits for what it contains. Returns the arguments of
# `writing.save`, None if the one before is not written yet.
Start = Callable[["Contents"], "Mapping[str, Any] | None"]


@dataclass
class Schedule:
    """When checkpoints are due: `every` so many batches, or seconds as a float. `step` and `at` are
    those of the newest one."""

    every: Any
    clock: Callable[[], float]
    step: int = 0
    at: float = 0.0

    def note_save(self, step: int) -> None:
        self.step, self.at = step, self.clock()

    def is_due(self, step: int) -> bool:
        if isinstance(self.every, int):
            return step // self.every > self.step // self.every
        return bool(self.every != "epoch" and self.clock() - self.at >= self.every)


class Contents:
    """Owns what the ranks have measured up to a checkpoint: this part of the call, of which each
    rank says it when it asks, after the parts `before`."""

    def __init__(self, progress: Progress, ranks: int, before: Sequence[Sequence[Measured]]) -> None:
        self.progress, self.ranks, self._before = progress, ranks, before
        self._results: dict[int, Measured] = {}
        self._complete = threading.Event()

    def add(self, question: Question) -> None:
        self._results[question.rank] = question.measured
        if len(self._results) == self.ranks:
            self._complete.set()

    @property
    def is_complete(self) -> bool:
        return self._complete.is_set()

    def end(self) -> None:
        """Note that no other rank will ask: one has failed."""
        self._complete.set()

    def wait(self) -> Contents:
        """Wait until all ranks have said what they have measured."""
        self._complete.wait()
        return self

    @property
    def part(self) -> Measured:
        """What the ranks have measured in this part of the call."""
        return merge_measured([self._by_rank])

    @property
    def call(self) -> Measured:
        """What all ranks have measured since the call began."""
        return merge_measured([*self._before, self._by_rank])

    @property
    def _by_rank(self) -> list[Measured]:
        return [self._results[rank] for rank in sorted(self._results)]


class WithinCall:
    """Answers the ranks, in any thread, for one part of a call, in which the ranks stay the same.

    fail  gets the error of a checkpoint that could not begin
    """

    def __init__(
        self,
        schedule: Schedule,
        start: Start,
        fail: Callable[[BaseException], None],
        *,
        step: int,
        ranks: int,
        before: Sequence[Sequence[Measured]],
    ) -> None:
        self._schedule, self._start, self._fail = schedule, start, fail
        self._ranks, self._before = ranks, before
        self._lock = threading.Lock()
        self._asked: dict[int, tuple[Contents, Reply]] = {}  # by the step, until all ranks have asked
        self._warned = self._ended = False
        self._from, self._since = step, schedule.clock()  # of the newest question
        self.first = self._next(step)

    def answer(self, question: Question) -> Reply:
        step = question.progress.step
        with self._lock:
            if self._ended:
                return Reply(math.inf)
            if step not in self._asked:
                contents = Contents(question.progress, self._ranks, self._before)
                arguments = self._begin(contents) if self._schedule.is_due(step) else None
                self._asked[step] = contents, Reply(self._next(step), arguments)
            contents, reply = self._asked[step]
            contents.add(question)
            if contents.is_complete:
                del self._asked[step]
            return reply

    def is_answering(self) -> bool:
        """Whether the ranks wait for an answer, as while the storage is looked at."""
        return self._lock.locked()

    def _begin(self, contents: Contents) -> Mapping[str, Any] | None:
        step = contents.progress.step
        try:
            arguments = self._start(contents)
        except Exception as error:
            self._fail(error)
            return None
        if arguments is not None:
            self._schedule.note_save(step)
            return arguments
        self._schedule.at = self._schedule.clock()
        if not self._warned:
            self._warned = True
            logger.warning(
                "the automatic checkpoint after step %d was left out, because the one before it is still being written. Later ones are "
                "left out without a message. For this storage, set a larger AutoCheckpoint(every=...)",
                step,
            )
        return None

    def _next(self, step: int) -> int:
        """The step after which the ranks ask next."""
        every, now = self._schedule.every, self._schedule.clock()
        if isinstance(every, int):
            return (step // every + 1) * every
        per_s = (step - self._from) / max(now - self._since, 1e-6)
        rest = (self._schedule.at + every - now) * per_s
        batches: int = max(1, min(math.ceil(rest), 2 * (step - self._from)))
        self._from, self._since = step, now
        return step + batches

    def end(self) -> None:
        """Note that the part of the call has ended."""
        with self._lock:
            self._ended = True
            for contents, _ in self._asked.values():
                contents.end()
