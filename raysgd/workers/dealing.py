"""Rows of a Ray Dataset, dealt by their place in its stream: so what ranks have used is always a beginning of it.

The dealer reads the data set once for all ranks, holds the blocks that may still be asked for, and answers which rows
of which blocks make one rank's part of a step. It waits for nobody: a rank that dies is one that asks no more, and a
new generation goes on at any row that is still held.
"""

from __future__ import annotations

import logging
import pickle
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from raysgd.sampling_plan import SamplingPlan

__all__ = ["Ask", "Dealer", "Dealt", "Piece", "Window"]

logger = logging.getLogger("raysgd")


@dataclass(frozen=True)
class Ask:
    """One rank's question for its part of the step that begins at row `start` of a pass.

    turn     of which call and generation; what an older one still asks for is not wanted any more
    step     rows that all ranks take together
    pad      at the end, a rank without rows repeats one
    floor    rows before this one are committed as far as this rank knows: it will not ask for them again
    """

    number: tuple[int, int]
    start: int
    step: int
    rank: int = 0
    world_size: int = 1
    turn: tuple[int, int] = (0, 0)
    pad: bool = True
    floor: int = 0

    def next(self, start: int, floor: int) -> Ask:
        return replace(self, start=start, floor=floor)


class Piece(NamedTuple):
    """Rows `start` to `stop` of one block."""

    block: Any
    start: int
    stop: int


class Dealt(NamedTuple):
    """One rank's rows; the row after the step; and whether they are new, or repeated by a rank that would have none."""

    pieces: tuple[Piece, ...]
    after: int
    fresh: bool


class Window:
    """The blocks of one pass between what nobody asks for any more and what has been read. Pure."""

    def __init__(self, blocks: Iterable[tuple[Any, int]]) -> None:
        self._source: Iterator[tuple[Any, int]] = iter(blocks)
        self._held: deque[tuple[int, Any, int]] = deque()
        self.begin = self.end = 0
        self.complete = False
        self.error: Exception | None = None

    def read_to(self, row: int, *, keep_from: int) -> None:
        """Reads until that row is known, or the pass is over."""
        while self.end < row and not self.complete:
            if self.error is not None:
                raise self.error  # every rank is to hear of it: a source that failed just ends when it is asked again
            try:
                found = next(self._source, None)
            except Exception as error:
                self.error = error
                raise
            if found is None:
                self.complete = True
                return
            block, rows = found
            if rows:
                self._held.append((self.end, block, rows))
                self.end += rows
            self.forget(keep_from)

    def forget(self, before: int) -> None:
        while self._held and self._held[0][0] + self._held[0][2] <= before:
            first, _, rows = self._held.popleft()
            self.begin = first + rows

    def pieces(self, start: int, stop: int) -> tuple[Piece, ...]:
        return tuple(
            Piece(block, max(start - first, 0), min(stop - first, rows))
            for first, block, rows in self._held
            if first < stop and first + rows > start
        )


class Dealer:
    """Owns the stream of one data set. One call at a time (an actor's default): the ranks ask for much the same."""

    def __init__(self, packed: bytes) -> None:
        self._dataset = pickle.loads(packed)
        if hasattr(self._dataset, "context"):
            self._dataset.context.enable_progress_bars = False  # there is no terminal here to draw them in
        self._number: tuple[int, int] | None = None
        self._window = Window(())
        self._turn = (-1, -1)
        self._floors: dict[int, int] = {}
        self._totals: dict[tuple[int, int], int] = {}

    def take(self, ask: Ask) -> Dealt | None:
        """One rank's part of one step; None at the end of the pass, and for who is late."""
        passed = ask.turn == self._turn and self._number is not None and ask.number < self._number
        if passed or ask.turn < self._turn or ask.start >= self._totals.get(ask.number, ask.start + 1):
            return None
        if ask.turn > self._turn:
            self._turn, self._floors = ask.turn, {}
            if self._window.error is not None:
                self._number = None
        if ask.number != self._number or ask.start < self._window.begin:
            self._open(ask)
        self._floors[ask.rank] = ask.floor
        lowest = min(self._floors.values()) if len(self._floors) == ask.world_size else self._window.begin
        window = self._window
        window.forget(lowest)
        window.read_to(ask.start + ask.step, keep_from=lowest)
        if window.complete:
            self._totals[ask.number] = window.end
        known = min(ask.start + ask.step, window.end)
        parts = SamplingPlan(total=known, step_size=ask.step, world_size=ask.world_size, pad=ask.pad).parts(ask.start)
        if not parts:
            return None
        mine = parts[ask.rank]
        return Dealt(window.pieces(mine.start, mine.stop), known, mine.fresh)

    def _open(self, ask: Ask) -> None:
        """A new pass; or one that must be read again up to a row, since it was begun before this dealer's time."""
        if ask.start > 0:
            logger.warning(
                "the data set is read anew, and its first %d row(s), which were used, are left out by their number: the "
                "same rows, if they come in the same order (ray.data.DataContext's execution_options.preserve_order)",
                ask.start,
            )
        self._number, self._floors = ask.number, {}
        self._window = Window(_blocks(self._dataset))
        self._window.read_to(ask.start, keep_from=ask.start)


def _blocks(dataset: Any) -> Iterator[tuple[Any, int]]:
    """References to the blocks of one pass, as they get ready, with the rows of each."""
    for bundle in dataset.iter_internal_ref_bundles():
        for entry in bundle.blocks:
            ref, about = (entry.ref, entry.metadata) if hasattr(entry, "ref") else entry
            yield ref, int(about.num_rows)
