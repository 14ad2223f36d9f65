"""One fan-out of a call over the generation that stands, until every rank has an outcome."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from raysgd.engine.border import Border
from raysgd.engine.crew import Crew
from raysgd.engine.hanging import HangGuard
from raysgd.outcomes import Failed, Interrupted, Lost, Outcome

__all__ = ["Watch"]

TICK_S = 0.1
USER_ERROR_S = 2.0


class Watch:
    """Owns the calls in flight. Frees the peers of a rank that fell; stops everybody at a border when asked.

    `wants_border` is asked at each tick; `on_trouble` is told once, when the first rank fell.
    """

    def __init__(
        self,
        crew: Crew,
        guard: HangGuard,
        *,
        wants_border: Callable[[], bool],
        on_trouble: Callable[[], None],
        lead: int = 2,
    ) -> None:
        self._crew, self._guard = crew, guard
        self._wants_border, self._on_trouble = wants_border, on_trouble
        self._lead = lead
        self._calls: dict[str, int] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.troubled_at: float | None = None

    def run(self, workers: list[str], method: str, arguments: Mapping[str, Any], generation: int) -> None:
        request = {"method": method, "arguments": dict(arguments)}
        for worker in workers:
            member = self._crew.members[worker]
            member.progress, member.partial = member.progress.at(method), None
            self._calls[worker] = self._crew.submit(worker, "run", request, generation=generation)
        border: Border | None = None
        while running := self._running():
            self._crew.pump(TICK_S)
            self._collect()
            if self.troubled_at is None and border is None and self._wants_border():
                border = Border(self._crew, {w: self._calls[w] for w in running}, lead=self._lead)
            if border is not None:
                border.advance(self._running())
            self._guard.tick(self._running(), others_fell=self.troubled_at is not None)
            if self._user_error_waited():
                break
        self._crew.forget(self._calls[worker] for worker in self._running())
        self.outcomes = {worker: self.outcomes[worker] for worker in workers if worker in self.outcomes}

    def _user_error_waited(self) -> bool:
        """A user's error does not wait for peers that are busy outside any collective."""
        failed = any(isinstance(outcome, Failed) for outcome in self.outcomes.values())
        return failed and self.troubled_at is not None and time.monotonic() - self.troubled_at > USER_ERROR_S

    def settle(self, limit_s: float) -> list[str]:
        """After an interruption: waits a little for those still running; who they are if they do not come."""
        deadline = time.monotonic() + limit_s
        while self._running() and time.monotonic() < deadline:
            self._crew.pump(TICK_S)
            self._collect()
        return self._running()

    def _running(self) -> list[str]:
        return [worker for worker in self._calls if worker not in self.outcomes]

    def _collect(self) -> None:
        for worker in self._running():
            outcome = self._crew.reply(self._calls[worker])
            if outcome is None:
                continue
            self.outcomes[worker] = outcome
            fell = isinstance(outcome, (Lost, Failed)) or (isinstance(outcome, Interrupted) and not outcome.asked)
            if fell and self.troubled_at is None:
                self.troubled_at = time.monotonic()
                self._on_trouble()
