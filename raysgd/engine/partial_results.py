"""Keep what a call has measured so far: one part for each generation that worked on it. Pure.
Driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from raysgd.constants import BATCH_COUNT, NUM_SAMPLES
from raysgd.core.outcomes import Ok, Outcome
from raysgd.core.snapshot import Snapshot


@dataclass(frozen=True)
class PartialResults:
    """What the ranks of one generation measured in their part of a call, in rank order."""

    outcomes: tuple[Outcome, ...]
    generation: int = 0

    @property
    def values(self) -> list[Any]:
        """Return the results that ranks reported, complete or partial. Ranks that reported none are
        left out."""
        return [value for outcome in self.outcomes if (value := getattr(outcome, "value", None)) is not None]

    def until(self, step: int) -> PartialResults:
        """Return the results of those ranks that are not known to have committed more than this
        step."""
        return replace(self, outcomes=tuple(outcome for outcome in self.outcomes if _step_of(outcome) <= step))

    @property
    def end(self) -> int:
        """Return the last step that any rank is known to have committed in it."""
        return max(map(_step_of, self.outcomes), default=0)


def _step_of(outcome: Outcome) -> int:
    return outcome.progress.step


def partial_results_since(snapshot: Snapshot, parts: Sequence[PartialResults], *, call: int) -> list[PartialResults]:
    """Return the results that still count in a call that continues from a snapshot: parts that
    ended before it, and, of the part in which it was taken, what the snapshot itself contains."""
    if snapshot.call < call:
        return []
    taken_at = snapshot.progress.step
    if snapshot.partial is None:
        return [part.until(taken_at) for part in parts]  # a survivor gave its state when a generation ended
    # A snapshot without any results was taken between two generations, so a part that ended at its step counts, too.
    is_empty = not any(map(snapshot.partial.metrics.get, (BATCH_COUNT, NUM_SAMPLES)))
    before = [part for part in parts[:-1] if part.end < taken_at or (is_empty and part.end == taken_at)]
    return [*before, PartialResults((Ok(snapshot.partial, snapshot.progress),))]
