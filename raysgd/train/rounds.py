"""What the ranks report, put together: a round is complete when every rank has reported. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from raysgd.train.errors import ReportMismatchError

__all__ = ["Report", "Round", "Rounds", "checkpoint_of"]

CALLS = {"report": "train.report()", "checkpoint": "train.save_checkpoint()"}


@dataclass(frozen=True)
class Report:
    """One call of one rank's. `checkpoint` is a checkpoint's bytes, where there is one."""

    rank: int
    kind: Literal["report", "checkpoint"] = "report"
    metrics: dict[str, Any] = field(default_factory=dict)
    checkpoint: bytes | None = None


Round = tuple[Report, ...]


class Rounds:
    """Owns what the ranks of one attempt have said and others have not yet."""

    def __init__(self, world_size: int) -> None:
        self._waiting: list[deque[Report]] = [deque() for _ in range(world_size)]

    def add(self, report: Report) -> Round | None:
        """Takes one report in; the round that it completes, if it does. Raises when it is of another kind than a
        peer's in the same round."""
        mine = self._waiting[report.rank]
        mine.append(report)
        same = [queue[len(mine) - 1] for queue in self._waiting if len(queue) >= len(mine)]
        if len({each.kind for each in same}) > 1:
            raise ReportMismatchError(_different_kinds(same))
        if all(self._waiting):
            return tuple(queue.popleft() for queue in self._waiting)
        return None

    def leftovers(self) -> list[Round]:
        """Rounds that never became complete, in their order; empties everything."""
        rounds = []
        while any(self._waiting):
            rounds.append(tuple(queue.popleft() for queue in self._waiting if queue))
        return rounds

    def check_all_said(self) -> None:
        """At the end of the function nobody may have said more than the others."""
        more = [rank for rank, queue in enumerate(self._waiting) if queue]
        if more:
            fewer = [rank for rank, queue in enumerate(self._waiting) if not queue]
            kinds = " and ".join(sorted({CALLS[self._waiting[rank][0].kind] for rank in more}))
            raise ReportMismatchError(
                f"rank(s) {_names(more)} called {kinds} more often than rank(s) {_names(fewer)}. Every rank must "
                "call it equally often: do not put it under `if world_rank() == 0`"
            )


def checkpoint_of(round_: Round) -> bytes | None:
    """The lowest rank's that has one: in data-parallel training all hold the same state."""
    return next((report.checkpoint for report in round_ if report.checkpoint is not None), None)


def _different_kinds(reports: list[Report]) -> str:
    said = "; ".join(
        f"rank(s) {_names([r.rank for r in reports if r.kind == kind])} called {call}"
        for kind, call in CALLS.items()
        if any(r.kind == kind for r in reports)
    )
    return f"the ranks disagree on what they report: {said}. Every rank must make the same calls in the same order"


def _names(ranks: list[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
