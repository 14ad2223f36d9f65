"""Deal the parts of a batch to the ranks by their speed. Pure. Both."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

EVERY = 50  # steps, at least, from one change of the deal to the next
GAIN = 0.9  # a change makes a step this much of what it was, or less
REMEMBERED = 10_000  # steps: each change in them doubles the wait for the next one
MOST_DOUBLED = 7
MEANS = 5  # of the steps in a window


def usual_seconds(seconds: Sequence[float]) -> float:
    """Return how long a part usually takes, from what it has taken in successive steps: the median
    of the means of each fifth; 0 if there were none. One long pause does not count; those of a
    throttled rank do, which come every few steps.

    >>> usual_seconds([0.25] * 49 + [60.0]), usual_seconds([0.25, 0.25, 0.25, 1.25] * 10)
    (0.25, 0.5)
    """
    fifth = -(-len(seconds) // MEANS) or 1
    return median([fmean(seconds[at : at + fifth]) for at in range(0, len(seconds), fifth)] or [0.0])


def dealt(parts: int, seconds: Sequence[float]) -> tuple[int, ...]:
    """Return how many parts each rank computes, one at least, to be done together as early as
    possible. A part takes each rank so many `seconds`; the first of equal ranks has more.

    >>> dealt(8, [0.1, 0.2])
    (6, 2)
    """
    deal = [1] * len(seconds)
    for _ in range(parts - len(deal)):
        ends = [(count + 1) * each for count, each in zip(deal, seconds, strict=True)]
        deal[ends.index(min(ends))] += 1
    return tuple(deal)


def longest(deal: Sequence[int], seconds: Sequence[float]) -> float:
    """Return when the last rank has computed its parts."""
    return max(count * each for count, each in zip(deal, seconds, strict=True))


class BySpeed:
    """Owns the deal of one generation, and decides when another one is better. All ranks have equal
    ones, because they call it with the same numbers after the same steps.

    A rank that is slow for some time only must not change the deal again and again: each change
    doubles the number of steps to the next one, over which ranks measure, until it is forgotten.
    """

    def __init__(self, parts: int, seconds: Sequence[float | None]) -> None:
        """Begin with the seconds that a part has taken each rank, None or 0 if that is not
        known."""
        usual = median([each for each in seconds if each] or [1.0])
        self._parts, self.deal = parts, dealt(parts, [each or usual for each in seconds])
        self._step = 0
        self._changes: list[int] = []

    @property
    def window(self) -> int:
        """Return over how many of the newest steps ranks measure their seconds."""
        return EVERY << min(len(self._changes), MOST_DOUBLED)

    def due(self) -> bool:
        """Note a step. Return whether `change` follows it."""
        self._step += 1
        self._changes = [each for each in self._changes if self._step - each < REMEMBERED]
        waited = self._step - (self._changes[-1] if self._changes else 0)
        return len(self.deal) > 1 and waited >= self.window and waited % EVERY == 0

    def change(self, seconds: Sequence[float]) -> bool:
        """Change the deal if that makes a step clearly shorter. Return whether it is another."""
        better = dealt(self._parts, seconds)
        if not all(seconds) or longest(better, seconds) > GAIN * longest(self.deal, seconds):
            return False
        self.deal = better
        self._changes.append(self._step)
        return True
