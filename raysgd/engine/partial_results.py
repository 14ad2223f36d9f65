"""What a call has to show so far: one piece for each generation that worked on it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raysgd.outcomes import Ok, Outcome
from raysgd.snapshot import Snapshot

__all__ = ["PartialResults", "partial_results_since"]


@dataclass(frozen=True)
class PartialResults:
    """What the ranks of one generation said of their part of a job, in rank order."""

    outcomes: tuple[Outcome, ...]

    @property
    def values(self) -> list[Any]:
        """Whole, partial and last known results; a rank that said nothing is left out."""
        return [value for outcome in self.outcomes if (value := getattr(outcome, "value", None)) is not None]

    @property
    def end(self) -> int:
        """The last step that any rank is known to have committed in it."""
        known = [outcome.progress for outcome in self.outcomes if hasattr(outcome, "progress")]
        return max((progress.step for progress in known if progress is not None), default=0)


def partial_results_since(snapshot: Snapshot, pieces: Sequence[PartialResults], *, call: int) -> list[PartialResults]:
    """What counts of a call that goes on from a snapshot: whole pieces that ended before it, and of the one it was
    taken in what it had counted itself."""
    if snapshot.call != call:
        return []
    if snapshot.partial is None:
        return list(pieces)  # a survivor handed it over as it ended: all that was counted until then stands
    taken_at = snapshot.progress.step
    before = [piece for piece in pieces[:-1] if piece.end < taken_at]
    # Taken where one generation ended and the next had not done anything yet: it says nothing of either.
    fresh = not snapshot.partial.get("batch_count") and not snapshot.partial.get("num_samples")
    if fresh:
        before = [piece for piece in pieces[:-1] if piece.end <= taken_at]
    return [*before, PartialResults((Ok(snapshot.partial, snapshot.progress),))]
