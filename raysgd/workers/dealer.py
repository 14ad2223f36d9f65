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

__all__ = ["BlockBuffer", "BlockSlice", "Dealer", "PartRequest", "RankRows"]

logger = logging.getLogger("raysgd")


@dataclass(frozen=True)
class PartRequest:
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

    def next(self, start: int, floor: int) -> PartRequest:
        return replace(self, start=start, floor=floor)


class BlockSlice(NamedTuple):
    """Rows `start` to `stop` of one block."""

    block: Any
    start: int
    stop: int


class RankRows(NamedTuple):
    """One rank's rows; the row after the step; and whether they are new, or repeated by a rank that would have none."""

    slices: tuple[BlockSlice, ...]
    after: int
    fresh: bool


class BlockBuffer:
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

    def slices(self, start: int, stop: int) -> tuple[BlockSlice, ...]:
        return tuple(
            BlockSlice(block, max(start - first, 0), min(stop - first, rows))
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
        self._buffer = BlockBuffer(())
        self._turn = (-1, -1)
        self._floors: dict[int, int] = {}
        self._totals: dict[tuple[int, int], int] = {}

    def take(self, request: PartRequest) -> RankRows | None:
        """One rank's part of one step; None at the end of the pass, and for who is late."""
        passed = request.turn == self._turn and self._number is not None and request.number < self._number
        if passed or request.turn < self._turn or request.start >= self._totals.get(request.number, request.start + 1):
            return None
        if request.turn > self._turn:
            self._turn, self._floors = request.turn, {}
            if self._buffer.error is not None:
                self._number = None
        if request.number != self._number or request.start < self._buffer.begin:
            self._open(request)
        self._floors[request.rank] = request.floor
        lowest = min(self._floors.values()) if len(self._floors) == request.world_size else self._buffer.begin
        buffer = self._buffer
        buffer.forget(lowest)
        buffer.read_to(request.start + request.step, keep_from=lowest)
        if buffer.complete:
            self._totals[request.number] = buffer.end
        known = min(request.start + request.step, buffer.end)
        parts = SamplingPlan(total=known, step_size=request.step, world_size=request.world_size, pad=request.pad).parts(
            request.start
        )
        if not parts:
            return None
        mine = parts[request.rank]
        return RankRows(buffer.slices(mine.start, mine.stop), known, mine.fresh)

    def _open(self, request: PartRequest) -> None:
        """A new pass; or one that must be read again up to a row, since it was begun before this dealer's time."""
        if request.start > 0:
            logger.warning(
                "the data set is read anew, and its first %d row(s), which were used, are left out by their number: the "
                "same rows, if they come in the same order (ray.data.DataContext's execution_options.preserve_order)",
                request.start,
            )
        self._number, self._floors = request.number, {}
        self._buffer = BlockBuffer(_blocks(self._dataset))
        self._buffer.read_to(request.start, keep_from=request.start)


def _blocks(dataset: Any) -> Iterator[tuple[Any, int]]:
    """References to the blocks of one pass, as they get ready, with the rows of each."""
    for bundle in dataset.iter_internal_ref_bundles():
        for entry in bundle.blocks:
            ref, about = (entry.ref, entry.metadata) if hasattr(entry, "ref") else entry
            yield ref, int(about.num_rows)
