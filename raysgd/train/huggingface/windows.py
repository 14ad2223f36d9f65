"""Divide the micro-batches of each step of a Trainer among the ranks there are. Pure arithmetic on
positions. Worker.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from raysgd.core.decisions.sampling_plan import RankShare


@dataclass(frozen=True)
class Windows:
    """How an epoch of `samples` is divided into steps, steps into parts, and parts among the ranks.

    A part is a micro-batch of `batch` samples, as in the first attempt, and a step has `per_step`
    of them, for all ranks together. They are dealt in turn, as accelerate deals them. So with the
    ranks of the first attempt each has its own ones, and with fewer the step has the same samples.
    All ranks compute equally many parts, because each takes part in the exchange: those with fewer
    repeat the first one of the step. With `drop_last`, an epoch ends with the last part that all
    `first_ranks` had.
    """

    samples: int
    batch: int
    per_step: int
    ranks: int
    rank: int
    first_ranks: int
    drop_last: bool = False

    @property
    def parts(self) -> int:
        """How many parts an epoch has."""
        if self.drop_last:
            return self.samples // self.batch // self.first_ranks * self.first_ranks
        return -(-self.samples // self.batch)

    @property
    def steps(self) -> int:
        """How many steps an epoch has."""
        return -(-self.parts // self.per_step)

    @property
    def most(self) -> int:
        """How many parts each rank has in a full step."""
        return -(-self.per_step // self.ranks)

    def epoch_after(self, steps: int) -> float:
        """The place in the data after so many steps, in epochs, as a rank of the first attempt
        counts it."""
        first = replace(self, ranks=self.first_ranks, rank=0)
        epoch, step = divmod(steps - 1, self.steps)
        return epoch + min((step + 1) * first.most, len(first)) / len(first)

    def count(self, step: int) -> int:
        """How many parts this step has for all ranks."""
        return min(self.per_step, self.parts - step * self.per_step)

    def of_rank(self, step: int) -> list[RankShare]:
        """This rank's parts of a step of an epoch."""
        first, count = step * self.per_step, self.count(step)
        places = range(self.rank, -(-count // self.ranks) * self.ranks, self.ranks)
        return [self._part(first + place if place < count else first, place < count) for place in places]

    def _part(self, part: int, fresh: bool) -> RankShare:
        start = part * self.batch
        return RankShare(start, min(start + self.batch, self.samples), fresh, weight=float(fresh), part=part)

    def __len__(self) -> int:
        """How many parts this rank has in an epoch, as a loader's length."""
        return (self.steps - 1) * self.most + len(self.of_rank(self.steps - 1)) if self.steps else 0
