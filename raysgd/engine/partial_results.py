"""What a call has measured so far: one part for each generation that worked on it. Pure. Driver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raysgd.core.outcomes import Ok, Outcome
from raysgd.core.snapshot import Snapshot

__all__ = ["PartialResults", "partial_results_since"]


@dataclass(frozen=True)
class PartialResults:
    """What the ranks of one generation measured in their part of a call, in rank order."""

    outcomes: tuple[Outcome, ...]

    @property
    def values(self) -> list[Any]:
        """Return complete, partial and last known results, without ranks that reported none."""
        return [value for outcome in self.outcomes if (value := getattr(outcome, "value", None)) is not None]

    @property
    def end(self) -> int:
        """Return the last step that any rank is known to have committed in it."""
        known = [outcome.progress for outcome in self.outcomes if hasattr(outcome, "progress")]
        return max((progress.step for progress in known if progress is not None), default=0)


def partial_results_since(snapshot: Snapshot, parts: Sequence[PartialResults], *, call: int) -> list[PartialResults]:
    """Return what counts of a call that continues from a snapshot: parts that ended before it, and of the one in which
    it was taken, what the snapshot itself had counted."""
    if snapshot.call != call:
        return []
    if snapshot.partial is None:
        return list(parts)  # a survivor handed it over as it ended: all that was counted until then is in it
    taken_at = snapshot.progress.step
    before = [part for part in parts[:-1] if part.end < taken_at]
    # Taken where one generation ended and the next had not done anything yet: it has nothing of either.
    fresh = not snapshot.partial.get("batch_count") and not snapshot.partial.get("num_samples")
    if fresh:
        before = [part for part in parts[:-1] if part.end <= taken_at]
    return [*before, PartialResults((Ok(snapshot.partial, snapshot.progress),))]
