"""Divides the rows of a Ray Dataset among ranks by their position in its stream. Both.

The rows that have been used are always a prefix of the stream. The dealer, an actor on the driver's
node, reads the data set once for all ranks, holds the blocks that ranks may still request, and
returns which rows of which blocks are one rank's part of a step. It never waits for a rank: a
failed rank sends no more requests, and a new generation can continue at any row that is still held.
"""

from __future__ import annotations

import logging
import pickle
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from raysgd.core.decisions.sampling_plan import SamplingPlan
from raysgd.errors import counted

logger = logging.getLogger("raysgd")


@dataclass(frozen=True)
class PartRequest:
    """One rank's request for its part of the step that begins at row `start` of a pass.

    number   which pass over the data set
    step     how many rows all ranks take together
    turn     the call and the generation; late requests of an older one are ignored
    pad      at the end, a rank without rows of its own repeats one
    floor    the first row that this rank may request again; it has committed those before
    """

    number: tuple[int, int]
    start: int
    step: int
    rank: int = 0
    world_size: int = 1
    turn: tuple[int, int] = (0, 0)
    pad: bool = True
    floor: int = 0


class BlockSlice(NamedTuple):
    """Rows `start` to `stop` of one block."""

    block: Any
    start: int
    stop: int


class RankRows(NamedTuple):
    """A rank's rows, the row after the step, and whether they are new or repeated."""

    slices: tuple[BlockSlice, ...]
    after: int
    fresh: bool


class BlockBuffer:
    """Owns the blocks of one pass that have been read and may still be requested. Pure."""

    def __init__(self, blocks: Iterable[tuple[Any, int]]) -> None:
        self._source: Iterator[tuple[Any, int]] = iter(blocks)
        self._blocks: deque[tuple[int, Any, int]] = deque()
        self.begin = self.end = 0
        self.complete = False
        self.error: Exception | None = None

    def read_to(self, row: int, *, keep_from: int) -> None:
        """Read until that row is known, or the pass has ended."""
        while self.end < row and not self.complete:
            if self.error is not None:
                raise self.error  # for every rank, because a source that has failed only ends when it is read again
            try:
                item = next(self._source, None)
            except Exception as error:
                self.error = error
                raise
            if item is None:
                self.complete = True
                return
            block, rows = item
            if rows:
                self._blocks.append((self.end, block, rows))
                self.end += rows
            self.forget(keep_from)

    def forget(self, before: int) -> None:
        """Drop the blocks that end before this row."""
        while self._blocks and self._blocks[0][0] + self._blocks[0][2] <= before:
            first, _, rows = self._blocks.popleft()
            self.begin = first + rows

    def slices(self, start: int, stop: int) -> tuple[BlockSlice, ...]:
        return tuple(
            BlockSlice(block, max(start - first, 0), min(stop - first, rows))
            for first, block, rows in self._blocks
            if first < stop and first + rows > start
        )


class Dealer:
    """Owns the stream of one data set. It serves one request at a time, an actor's default."""

    def __init__(self, packed: bytes) -> None:
        self._dataset = pickle.loads(packed)
        if hasattr(self._dataset, "context"):
            self._dataset.context.enable_progress_bars = False  # an actor has no terminal
        self._number: tuple[int, int] | None = None
        self._buffer = BlockBuffer(())
        self._turn = (-1, -1)
        self._floors: dict[int, int] = {}
        self._totals: dict[tuple[int, int], int] = {}

    def take(self, request: PartRequest) -> RankRows | None:
        """Take a rank's part of a step; None at the end of the pass, and for late requests."""
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
        if known <= request.start:
            return None
        ranks = request.world_size
        plan = SamplingPlan(total=known, step_size=request.step, parts=ranks, world_size=ranks, pad=request.pad)
        for mine in plan.of_rank(request.rank, request.start):
            return RankRows(buffer.slices(mine.start, mine.stop), known, mine.fresh)
        return RankRows((), known, fresh=False)

    def _open(self, request: PartRequest) -> None:
        """Begin a pass. What another dealer had begun is read up to that row."""
        if request.start > 0:
            logger.warning(
                "raysgd reads the data set again, and skips %s, which have been used. If the order of rows has changed, it skips the "
                "wrong ones. Set execution_options.preserve_order of ray.data.DataContext",
                counted(request.start, "row"),
            )
        self._number, self._floors = request.number, {}
        self._buffer = BlockBuffer(_blocks(self._dataset))
        self._buffer.read_to(request.start, keep_from=request.start)


def _blocks(dataset: Any) -> Iterator[tuple[Any, int]]:
    """Yield references to the blocks of one pass as they become ready, with their rows."""
    for bundle in dataset.iter_internal_ref_bundles():
        for entry in bundle.blocks:
            ref, about = (entry.ref, entry.metadata) if hasattr(entry, "ref") else entry
            yield ref, int(about.num_rows)
