"""Agree on a batch boundary at which all ranks stop, while training continues. Driver.

The driver proposes a step that is a little ahead of all ranks. A rank that has begun a later step
refuses, and the next proposal is further ahead. When all ranks have agreed, the driver confirms,
and they stop there: nothing is interrupted or redone.
"""

from __future__ import annotations

from collections.abc import Collection

from raysgd.core.channel.messages import BoundaryAnswer, ConfirmBoundary, ProposeBoundary
from raysgd.engine.worker_table import WorkerTable

PATIENCE_S = 0.1


class Boundary:
    """One planned stop of one running call. Owns the current proposal and the answers to it.
    `settled` is True once all ranks have agreed."""

    def __init__(self, table: WorkerTable, calls: dict[str, int], *, lead: int = 2) -> None:
        self._table = table
        self._calls = calls
        self._round = 0
        self._lead = lead
        self._accepted: dict[str, bool] = {}
        self._begun = -1
        self._too_late = False
        self._asked_at = 0.0
        self.settled = False
        self._propose(max(table[worker].progress.step for worker in calls))

    def _propose(self, begun: int) -> None:
        self._round = self._table.next_number()  # an answer to an older proposal does not count
        self._accepted, self._begun, self._too_late = {}, -1, False
        self._asked_at = self._table.clock()
        for worker, call in self._calls.items():
            self._table.group.send(worker, ProposeBoundary(self._round, call, begun + self._lead))

    def advance(self, still_running: Collection[str]) -> None:
        """Process the answers that have arrived. Ranks that have ended need not agree."""
        if self.settled or not still_running:
            return
        for worker, answer in self._table.take_answers(BoundaryAnswer, self._round):
            self._accepted[worker] = answer.accepted
            self._begun = max(self._begun, answer.begun)
            self._too_late |= not answer.accepted and answer.begun >= 0
        if len(self._accepted) < len(still_running):
            return
        if all(self._accepted.get(worker) for worker in still_running):
            self.settled, message = True, ConfirmBoundary()
            for worker in still_running:
                self._table.group.send(worker, message)
        elif not all(self._accepted.values()):
            self._propose_again()

    def _propose_again(self) -> None:
        """Propose again after a refusal. A rank that had begun a later step needs a boundary
        further ahead. A rank that has not begun its call (it answers -1) only needs a moment, and a
        growing lead would put the boundary beyond the end of the call."""
        if self._too_late:
            self._lead *= 2
        elif self._table.clock() - self._asked_at < PATIENCE_S:
            return
        self._propose(max(self._begun, *(self._table[worker].progress.step for worker in self._calls)))
