"""One fan-out of a call over the generation that stands, until every rank has an outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from raysgd.engine.boundary import Boundary
from raysgd.engine.watchdog import Watchdog
from raysgd.engine.worker_table import WorkerTable
from raysgd.outcomes import Failed, Interrupted, Lost, Outcome

__all__ = ["FanOut"]

TICK_S = 0.1
USER_ERROR_S = 2.0


class FanOut:
    """Owns the calls in flight. Frees the peers of a rank that fell; stops everybody at a border when asked.

    `wants_border` is asked at each tick; `on_trouble` is told once, when the first rank fell. With `hurry_s`, ranks need
    not pass the same borders: so long after one of them stopped as asked, the others are cut short where they are.
    """

    def __init__(
        self,
        table: WorkerTable,
        watchdog: Watchdog,
        *,
        wants_border: Callable[[], bool],
        on_trouble: Callable[[], None],
        lead: int = 2,
        hurry_s: float | None = None,
    ) -> None:
        self._table, self._watchdog = table, watchdog
        self._wants_border, self._on_trouble = wants_border, on_trouble
        self._lead, self._hurry_s = lead, hurry_s
        self._stopped_at: float | None = None
        self._hurried = False
        self._calls: dict[str, int] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.troubled_at: float | None = None

    def run(self, workers: list[str], method: str, arguments: Mapping[str, Any], generation: int) -> None:
        request = {"method": method, "arguments": dict(arguments)}
        for worker in workers:
            member = self._table.members[worker]
            member.progress, member.partial = member.progress.at(method), None
            self._calls[worker] = self._table.submit(worker, "run", request, generation=generation)
        border: Boundary | None = None
        while running := self._running():
            self._table.pump(TICK_S)
            self._collect()
            if self.troubled_at is None and border is None and self._wants_border():
                border = Boundary(self._table, {w: self._calls[w] for w in running}, lead=self._lead)
            if border is not None:
                border.advance(self._running())
                self._hurry()
            self._watchdog.tick(self._running(), others_fell=self.troubled_at is not None)
            if self._user_error_waited():
                break
        self._table.forget(self._calls[worker] for worker in self._running())
        self.outcomes = {worker: self.outcomes[worker] for worker in workers if worker in self.outcomes}

    def _hurry(self) -> None:
        """They may wait for the one that stopped, in a collective call that would end by its limit only."""
        stopped = [o for o in self.outcomes.values() if isinstance(o, Interrupted) and o.asked]
        if self._hurry_s is None or not stopped or self._hurried:
            return
        self._stopped_at = self._stopped_at or self._table.clock()
        if self._running() and self._table.clock() - self._stopped_at > self._hurry_s:
            self._hurried = True
            self._on_trouble()

    def _user_error_waited(self) -> bool:
        """A user's error does not wait for peers that are busy outside any collective."""
        failed = any(isinstance(outcome, Failed) for outcome in self.outcomes.values())
        return failed and self.troubled_at is not None and self._table.clock() - self.troubled_at > USER_ERROR_S

    def settle(self, limit_s: float) -> list[str]:
        """After an interruption: waits a little for those still running; who they are if they do not come."""
        deadline = self._table.clock() + limit_s
        while self._running() and self._table.clock() < deadline:
            self._table.pump(TICK_S)
            self._collect()
        return self._running()

    def _running(self) -> list[str]:
        return [worker for worker in self._calls if worker not in self.outcomes]

    def _collect(self) -> None:
        for worker in self._running():
            outcome = self._table.reply(self._calls[worker])
            if outcome is None:
                continue
            if self._hurried and isinstance(outcome, Interrupted) and not outcome.reason:
                outcome = replace(outcome, asked=True)
            self.outcomes[worker] = outcome
            fell = isinstance(outcome, (Lost, Failed)) or (isinstance(outcome, Interrupted) and not outcome.asked)
            if fell and self.troubled_at is None:
                self.troubled_at = self._table.clock()
                self._on_trouble()
