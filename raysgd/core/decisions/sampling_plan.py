"""Divide an epoch among the ranks, step by step. Pure arithmetic on positions. Both.

An epoch is a sequence of units (sample indices, or batches if the user has a batch sampler). What
is committed is always a prefix of that sequence: `offset` units. One step takes the next
`step_size` units, divided into parts, and divides the parts among the ranks. So at every batch
boundary the rest of the epoch can be divided among any other number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class RankShare(NamedTuple):
    """One part of a step, which one rank computes: order[start:stop].

    fresh      False if another rank, or this one before, has the same units
    rows       how many units the step has
    weight     this part's units, relative to an equal share of the ranks: 1.0 if each has one part
               and all have the same size, 0.0 if they are not fresh. The mean over the ranks of
               gradients with these weights is the mean over the step's units
    last_part  False if another part of the same step follows on this rank
    part       which of the step's parts it is, on any rank; of units that are repeated, one that
               this rank has in other steps, too
    """

    start: int
    stop: int
    fresh: bool = True
    rows: int = 0
    weight: float = 1.0
    last_part: bool = True
    part: int = 0


class Division(NamedTuple):
    """How a batch of the run is divided: it has as many `batches` of the loader, and so many
    `parts`, of which each rank computes as many as the `deal` says; without one, all ranks the
    same."""

    batches: int
    parts: int
    deal: tuple[int, ...] = ()


@dataclass(frozen=True)
class SamplingPlan:
    """How an epoch of `total` units is divided into steps, steps into parts, and parts among ranks.

    `step_size` is how many units a full step has, which is divided into `parts` parts. The last,
    smaller step has smaller parts, and fewer if it has fewer units than that. Each rank has
    consecutive parts, and rank 0 the first. In training (`pad=True`), every rank computes equally
    many, because it must take part in the exchange: those with fewer parts repeat one; with a
    `deal`, each has its own number, and repeats parts in a step that has fewer. In evaluations
    (`pad=False`), nothing is repeated.
    """

    total: int
    step_size: int
    parts: int
    world_size: int
    drop_last: bool = False
    pad: bool = True
    deal: tuple[int, ...] = ()

    def steps_left(self, offset: int) -> int:
        rest = max(self.total - offset, 0)
        return rest // self.step_size if self.drop_last else -(-rest // self.step_size)

    def offset_after(self, offset: int) -> int:
        """The offset after the step that begins at `offset`."""
        return min(offset + self.step_size, self.total)

    def step_at(self, offset: int) -> list[RankShare]:
        """The parts of the step that begins at `offset`."""
        units = max(self.offset_after(offset) - offset, 0)
        base, extra = divmod(units, self.parts)
        shares = []
        for part in range(min(units, self.parts)):
            start, size = offset + part * base + min(part, extra), base + (part < extra)
            weight = size * self.world_size / units
            shares.append(RankShare(start, start + size, True, units, weight, part=part))
        return shares

    def of_rank(self, rank: int, offset: int) -> list[RankShare]:
        """One rank's parts of the step that begins at `offset`: the same in each step. If it pads
        without a deal, all ranks have equally many, and repeat units if they have fewer."""
        parts, shares = self.step_at(offset), list[RankShare]()
        base, extra = (0, 0) if self.deal else divmod(self.parts, self.world_size)
        first = sum(self.deal[:rank]) + rank * base + min(rank, extra)
        count = self.deal[rank] if self.deal else base + (rank < extra)
        for place in range(first, first + count):
            if place < len(parts):
                shares.append(parts[place])
            elif self.pad and parts:
                shares.append(parts[rank % len(parts)]._replace(fresh=False, weight=0.0, part=place))
        if self.pad and shares and rank >= extra > 0:
            shares.append(shares[-1]._replace(fresh=False, weight=0.0))
        return [*(each._replace(last_part=False) for each in shares[:-1]), *shares[-1:]]

    def parts_of(self, rank: int, offset: int) -> Iterator[tuple[int, RankShare]]:
        """Yield one rank's parts from `offset` to the end, each after the offset after its step."""
        full = max(self.total - offset, 0) // self.step_size  # nearly all steps, which are divided alike
        alike = self.of_rank(rank, offset) if full else []
        for moved in range(0, full * self.step_size, self.step_size):
            after = offset + moved + self.step_size
            for start, stop, *rest in alike:
                yield after, RankShare._make((start + moved, stop + moved, *rest))
        offset += full * self.step_size
        for _ in range(self.steps_left(offset)):
            after = self.offset_after(offset)
            yield from ((after, part) for part in self.of_rank(rank, offset))
            offset = after


def optimizer_steps(calls: int, *, batches: int | None, num_steps: int | None, window: int) -> int:
    """Count the optimizer steps that this many calls of `train` make, beginning with an epoch.

    An epoch has `batches` for each rank (None: it has no end), a call has `num_steps` of them
    (None: an epoch), and `window` batches share a step, fewer at the end of an epoch or a call.
    """
    if num_steps is None or batches is None:
        each = batches if num_steps is None else num_steps
        assert each is not None
        return calls * -(-each // window)
    steps, remainder = 0, batches
    for _ in range(calls):
        rest = num_steps
        while rest:
            part = min(rest, remainder)
            steps += -(-part // window)
            rest -= part
            remainder = remainder - part or batches
    return steps
