"""Agreeing on the batch after which everybody stops, while training goes on.

The driver proposes a step a little ahead of everybody. A rank that has begun a later one refuses, and the next
proposal lies further ahead. When all consent, they are told so and stop there: nothing is cut short or redone.
"""

from __future__ import annotations

from collections.abc import Sequence

from raysgd.core.messages import BoundaryAnswer, ConfirmBoundary, ProposeBoundary
from raysgd.engine.crew import Crew

__all__ = ["Border"]

PATIENCE_S = 0.1


class Border:
    """One planned stop of one running call. Owns the round of proposals; `settled` once all have consented."""

    def __init__(self, crew: Crew, calls: dict[str, int], *, lead: int = 2) -> None:
        self._crew = crew
        self._calls = calls
        self._round = 0
        self._lead = lead
        self._consents: dict[str, bool] = {}
        self._begun = -1
        self._too_late = False
        self._asked_at = 0.0
        self.settled = False
        self._propose(max(crew.members[worker].progress.step for worker in calls))

    def _propose(self, begun: int) -> None:
        self._round = next(self._crew.rounds)  # never used before: an answer to an older border means nothing here
        self._consents, self._begun, self._too_late = {}, -1, False
        self._asked_at = self._crew.clock()
        for worker, call in self._calls.items():
            self._crew.group.tell(worker, ProposeBoundary(self._round, call, begun + self._lead))

    def advance(self, still_running: Sequence[str]) -> None:
        """Takes in the answers that have come. Ranks that have finished their call need not consent."""
        if self.settled:
            return
        for worker, answer in self._crew.take_answers(BoundaryAnswer):
            if answer.round == self._round:
                self._consents[worker] = answer.accepted
                self._begun = max(self._begun, answer.begun)
                self._too_late |= not answer.accepted and answer.begun >= 0
        if still_running and all(self._consents.get(worker) for worker in still_running):
            self.settled = True
            for worker in still_running:
                self._crew.group.tell(worker, ConfirmBoundary())
        elif any(not kept for kept in self._consents.values()) and len(self._consents) >= len(still_running):
            self._again()

    def _again(self) -> None:
        """Somebody refused. A rank that had begun a later step needs a border further ahead; one that has not begun
        its call at all (it says -1) only needs a moment: a lead that grew meanwhile would be a border never reached."""
        if self._too_late:
            self._lead *= 2
        elif self._crew.clock() - self._asked_at < PATIENCE_S:
            return
        self._propose(max(self._begun, *(self._crew.members[worker].progress.step for worker in self._calls)))
