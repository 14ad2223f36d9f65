"""Agreeing on the batch after which everybody stops, while training goes on.

The driver proposes a step a little ahead of everybody. A rank that has begun a later one refuses, and the next
proposal lies further ahead. When all consent, they are told so and stop there: nothing is cut short or redone.
"""

from __future__ import annotations

from collections.abc import Sequence

from raysgd.engine.crew import Crew

__all__ = ["Border"]


class Border:
    """One planned stop of one running call. Owns the round of proposals; `settled` once all have consented."""

    def __init__(self, crew: Crew, calls: dict[str, int]) -> None:
        self._crew = crew
        self._calls = calls
        self._round = 0
        self._lead = 2
        self._consents: dict[str, bool] = {}
        self.settled = False
        self._propose(max(crew.members[worker].progress.step for worker in calls))

    def _propose(self, begun: int) -> None:
        self._round += 1
        self._consents = {}
        at = begun + self._lead
        self._lead *= 2
        for worker, call in self._calls.items():
            message = {"t": "propose", "id": self._round, "call": call, "at": at}
            self._crew.group.tell(worker, message)

    def advance(self, still_running: Sequence[str]) -> None:
        """Takes in the answers that have come. Ranks that have finished their call need not consent."""
        if self.settled:
            return
        begun = 0
        for answer in [a for a in self._crew.answers if a.message["t"] == "consent"]:
            self._crew.answers.remove(answer)
            if answer.message["id"] == self._round:
                self._consents[answer.worker] = bool(answer.message["kept"])
            begun = max(begun, int(answer.message["begun"]))
        if any(not kept for kept in self._consents.values()) and len(self._consents) >= len(still_running):
            self._propose(begun)
        elif still_running and all(self._consents.get(worker) for worker in still_running):
            self.settled = True
            for worker in still_running:
                self._crew.group.tell(worker, {"t": "confirm"})
