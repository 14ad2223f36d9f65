"""Divide an epoch among the ranks, step by step. Pure arithmetic on positions. Both.

An epoch is a sequence of units (sample indices, or batches if the user has a batch sampler). What
is committed is always a prefix of that sequence: `offset` units. One step takes the next
`step_size` units and divides them among the ranks. So at every batch boundary the rest of the epoch
can be divided among any other number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class RankPart(NamedTuple):
    """One rank's units of one step: order[start:stop].

    fresh   False if another rank, or an earlier piece, has the same units
    rows    how many units all ranks together have in the step
    weight  this part's units, relative to an equal share of the step: 1.0 if all ranks have the
            same number, 0.0 if they are not fresh. The mean over the ranks of gradients with these
            weights is the mean over the step's units
    whole   False if another piece of the rank's part follows in the same step
    part    which of the step's parts it is, whoever computes it; of units that are repeated, the
            one that has none
    """

    start: int
    stop: int
    fresh: bool = True
    rows: int = 0
    weight: float = 1.0
    whole: bool = True
    part: int = 0

    def pieces(self, count: int) -> Iterator[RankPart]:
        """Yield this part in `count` pieces. One without a unit of its own repeats one."""
        size = self.stop - self.start
        for piece in range(count):
            start, stop = (self.start + size * each // count for each in (piece, piece + 1))
            last = piece == count - 1
            if stop > start and self.fresh:
                yield RankPart(start, stop, True, self.rows, self.weight * (stop - start) / size, last, self.part)
            else:
                start = min(start, self.stop - 1)
                yield RankPart(start, start + 1, False, self.rows, 0.0, last, self.part)


@dataclass(frozen=True)
class SamplingPlan:
    """How `world_size` ranks divide an epoch of `total` units.

    `step_size` is how many units all ranks take together in one full step. The last, smaller step
    is divided evenly. If fewer units than ranks remain, the ranks without a unit of their own
    repeat one of another rank (`pad=True`, for training, where every rank must take part in the
    all-reduce) or skip the step (`pad=False`, for validation). A rank that has more than `most`
    units in a step processes them in several pieces, and all ranks in equally many. With `workers`,
    the pieces are the parts that so many ranks would have, if they are more.
    """

    total: int
    step_size: int
    world_size: int
    drop_last: bool = False
    pad: bool = True
    most: int | None = None
    workers: int | None = None

    def pieces_of(self, units: int) -> int:
        """Return in how many pieces each rank processes its part of a step with this many units."""
        return 1 if self.most is None else max(-(-units // (self.world_size * self.most)), 1)

    def steps_left(self, offset: int) -> int:
        """Return how many steps the epoch has from `offset` on."""
        left = max(self.total - offset, 0)
        return left // self.step_size if self.drop_last else -(-left // self.step_size)

    def offset_after(self, offset: int) -> int:
        """Return the offset after the step that begins at `offset`."""
        return min(offset + self.step_size, self.total)

    def parts(self, offset: int) -> list[RankPart]:
        """Return every rank's part of the step that begins at `offset`, in rank order."""
        units = self.offset_after(offset) - offset
        if units <= 0:
            return []
        base, extra = divmod(units, self.world_size)
        parts = []
        start = offset
        for rank in range(self.world_size):
            size = base + (rank < extra)
            if size:
                parts.append(RankPart(start, start + size, True, units, size * self.world_size / units, part=rank))
            elif self.pad:
                again = offset + rank % units
                parts.append(RankPart(again, again + 1, False, units, 0.0, part=rank))
            else:
                parts.append(RankPart(start, start, False, units, 0.0, part=rank))
            start += size
        return parts

    def parts_of(self, rank: int, offset: int) -> Iterator[RankPart]:
        """Yield one rank's parts from `offset` to the end: one for each step, or its pieces."""
        if self.workers is not None and self.workers > self.world_size:
            for _ in range(self.steps_left(offset)):
                yield from self._parts_of_workers(rank, offset, self.workers)
                offset = self.offset_after(offset)
            return
        base, extra = divmod(self.step_size, self.world_size)
        size = base + (rank < extra)
        full_steps = max(self.total - offset, 0) // self.step_size if size else 0
        # This runs once for each batch. Nearly all steps are full ones, for which it is faster than `parts`.
        first = offset + rank * base + min(rank, extra)
        rows, weight, pieces = self.step_size, size * self.world_size / self.step_size, self.pieces_of(self.step_size)
        for start in range(first, first + full_steps * self.step_size, self.step_size):
            part = RankPart(start, start + size, True, rows, weight, part=rank)
            if pieces == 1:
                yield part
            else:
                yield from part.pieces(pieces)
        offset += full_steps * self.step_size
        for _ in range(self.steps_left(offset)):
            part = self.parts(offset)[rank]
            yield from part.pieces(self.pieces_of(part.rows)) if self.most else (part,)
            offset = self.offset_after(offset)

    def _parts_of_workers(self, rank: int, offset: int, workers: int) -> Iterator[RankPart]:
        """Yield, as this rank's pieces, parts that so many workers would have: the same in each
        step, the first rank from the first worker's on. One that has fewer repeats its last. In a
        step with too few units, some repeat those of another part."""
        parts = SamplingPlan(self.total, self.step_size, workers).parts(offset)
        parts = [each for each in parts if each.fresh]
        own = SamplingPlan(workers, workers, self.world_size).parts(0)[rank]
        pieces = -(-workers // self.world_size)
        for piece in range(pieces):
            place, last = min(own.start + piece, own.stop - 1), piece == pieces - 1
            fresh = piece < own.stop - own.start and place < len(parts)
            part = parts[min(place, len(parts) - 1)]
            weight = (part.stop - part.start) * self.world_size / part.rows if fresh else 0.0
            yield RankPart(part.start, part.stop, fresh, part.rows, weight, last, place)


def optimizer_steps(calls: int, *, batches: int | None, num_steps: int | None, window: int) -> int:
    """Return how many optimizer steps this many calls of `train` make, beginning with an epoch.

    An epoch has `batches` for each rank (None: it has no end), a call has `num_steps` of them
    (None: an epoch), and `window` batches share a step, fewer at the end of an epoch or a call.
    """
    if num_steps is None or batches is None:
        each = batches if num_steps is None else num_steps
        assert each is not None
        return calls * -(-each // window)
    steps, left = 0, batches
    for _ in range(calls):
        rest = num_steps
        while rest:
            part = min(rest, left)
            steps += -(-part // window)
            rest -= part
            left = left - part or batches
    return steps
