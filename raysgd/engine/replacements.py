"""Replacements: started and warmed beside a running group, so that joining takes it no longer than a rejoin."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from raysgd.config import Limits
from raysgd.engine.worker_table import WorkerTable
from raysgd.outcomes import Failed, Ok

__all__ = ["Replacements"]

logger = logging.getLogger("raysgd")

LOOK_EVERY_S = 0.5
GATHER_S = 3.0
# Where every change of members ends all processes, it is worth more patience to have one change only.
GATHER_ALL_S = 15.0
LATE_S = 15.0


class Replacements:
    """Owns the workers that do not belong to the group yet. Never touches a member.

    Where a process can meet others once only (`in_place` is False), a recruit is ready when it is up, and is set up
    when it has met its group.
    """

    def __init__(
        self, table: WorkerTable, warm: Callable[[], dict[str, Any]], *, limits: Limits, in_place: bool = True
    ) -> None:
        self._table, self._warm, self._in_place = table, warm, in_place
        self._patience_s, self._setup_s = limits.start_s, limits.setup_s
        self._launched: dict[str, float] = {}
        self._doubted: dict[str, float] = {}
        self._warming: dict[str, int] = {}
        self.ready: list[str] = []
        self.failure: Failed | None = None
        self.stuck = ""  # of the newest one whose set-up did not end
        self._ready_at = 0.0
        self._look_at = 0.0
        self._pause_s = LOOK_EVERY_S
        self._late_s = LATE_S

    @property
    def starting(self) -> int:
        """Those on their way, without the doubted ones: somebody else is started for them."""
        return len(self._launched) + len(self._warming)

    def gathered(self) -> bool:
        """Are those that are ready all that will be ready soon? One rejoin for several is better than several."""
        waited = self._table.clock() - self._ready_at
        enough = GATHER_S if self._in_place else GATHER_ALL_S
        return bool(self.ready) and (self.starting == 0 or waited > enough)

    def look(self, missing: int) -> None:
        """Starts what is missing and fits, now and then; moves the ones on their way along."""
        self.tick()
        now = self._table.clock()
        wanted = missing - self.starting - len(self.ready)
        if wanted <= 0 or now < self._look_at:
            return
        self._look_at = now + self._pause_s
        room = self._table.group.room()
        if room > 0:
            self.launch(min(wanted, room))

    def look_at_once(self) -> None:
        """Forget the pause after a failed start: the user asks for workers now."""
        self._pause_s, self._look_at = LOOK_EVERY_S, 0.0

    def launch(self, count: int) -> None:
        for worker in self._table.launch(count):
            self._launched[worker] = self._table.clock()
        if not self._in_place:
            self._ready_at = self._table.clock()
        self.failure, self.stuck = None, ""

    def tick(self) -> None:
        for worker in [*self._launched, *self._doubted, *self._warming, *self.ready]:
            member = self._table.members.get(worker)
            if member is None or member.gone is not None:
                self._drop(worker, "it ended before it was ready")
        for worker, since in [*self._launched.items(), *self._doubted.items()]:
            if self._table.members[worker].arrived:
                self._launched.pop(worker, None)
                self._doubted.pop(worker, None)
                if self._in_place:
                    self._warming[worker] = self._table.submit(worker, "warm", self._warm())
                else:
                    self._got_ready(worker)
            elif self._table.clock() - since > self._patience_s:
                self._drop(worker, f"its process did not come up within {self._patience_s:.0f} s")
            elif worker in self._launched and self._late(since):
                self._doubted[worker] = self._launched.pop(worker)
        for worker, call in list(self._warming.items()):
            outcome = self._table.reply(call)
            if isinstance(outcome, Ok):
                del self._warming[worker]
                self._table.members[worker].built = True
                self._got_ready(worker)
            elif outcome is not None:
                story = outcome.traceback if isinstance(outcome, Failed) else str(outcome)
                self.failure = outcome if isinstance(outcome, Failed) else None
                self._drop(worker, f"its set-up failed: {story}")
            elif self._table.clock() - self._table.members[worker].moved_at > self._setup_s:
                story = next(iter(self._table.stuck([worker], "warm", self._setup_s).values()), "")
                self.stuck = self._table.unfinished.get(worker, "")
                self._drop(worker, story or "it finished its set-up only after the limit")
            else:
                self._table.end_if_silent(worker, "warm")

    def _late(self, since: float) -> bool:
        """Ray can forget an actor that was being started on a node when that died. For one that is late although there
        is room for another, another is tried; who comes first is taken. Later each time: it could just be a slow machine."""
        late = self._table.clock() - since > self._late_s and self._table.group.room() > 0
        if late:
            self._late_s = min(self._late_s * 2, self._patience_s)
        return late

    def take(self, most: int) -> list[str]:
        """Hands the ready ones over to the group, as many as it has places for; the others are sent home."""
        taken, surplus, self.ready = self.ready[:most], self.ready[most:], []
        if len(taken) == most:
            surplus += self._doubted
            self._doubted = {}
        for worker in surplus:
            self._table.dismiss(worker)
        return taken

    def take_back(self, workers: Iterable[str]) -> None:
        """The generation they were taken for did not stand: those that can try again wait for the next one."""
        for worker in workers:
            member = self._table.members.get(worker)
            if member is not None and member.gone is None and self._in_place:
                self._got_ready(worker)
            else:
                self._table.dismiss(worker)

    def _got_ready(self, worker: str) -> None:
        self.ready.append(worker)
        self._ready_at = self._table.clock()
        self._pause_s, self._late_s = LOOK_EVERY_S, LATE_S

    def dismiss_all(self) -> None:
        for worker in [*self._launched, *self._doubted, *self._warming, *self.ready]:
            self._table.dismiss(worker)
        self._launched, self._doubted, self._warming, self.ready = {}, {}, {}, []

    def _drop(self, worker: str, why: str) -> None:
        for waiting in (self._launched, self._doubted, self._warming):
            waiting.pop(worker, None)
        if worker in self.ready:
            self.ready.remove(worker)
        self._table.dismiss(worker)
        if self._table.clock() >= self._look_at:  # several that fail together, with their node perhaps, count once
            self._pause_s = min(self._pause_s * 2, 30.0)
            self._look_at = self._table.clock() + self._pause_s
        logger.warning("a replacement was given up (%s); the next one in %.1f s", why, self._pause_s)
