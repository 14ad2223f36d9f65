"""Planned changes: newcomers in, leavers out, at a batch border. Nothing is lost, nothing is redone."""

from __future__ import annotations

from collections.abc import Sequence

from raysgd.config import ElasticConfig, Limits
from raysgd.engine.failure import unfinished_story
from raysgd.engine.recovery_log import RecoveryLog
from raysgd.engine.replacements import Replacements
from raysgd.engine.standing import Standing
from raysgd.engine.worker_table import WorkerTable
from raysgd.errors import ResourceError, WorkerStartError
from raysgd.outcomes import Ok
from raysgd.snapshot import Snapshot
from raysgd.workers.blob import Blob

__all__ = ["Membership"]


class Membership:
    """Owns who is to leave. Asks nobody to stop by itself: the watch asks it whether there is a reason to."""

    def __init__(
        self,
        table: WorkerTable,
        standing: Standing,
        replacements: Replacements,
        log: RecoveryLog,
        *,
        elastic: ElasticConfig,
        limits: Limits,
        in_place: bool = True,
    ) -> None:
        self._table, self._standing, self._replacements, self._log = table, standing, replacements, log
        self._elastic, self._limits, self._in_place = elastic, limits, in_place
        self._leaving: dict[str, str] = {}

    @property
    def missing(self) -> int:
        return self._table.target - len(self._table.seated())

    def due(self) -> bool:
        """Before a call: is there a change to be made right away?"""
        if self._elastic.grow and self._table.group.elastic:
            self._replacements.look(self.missing)
        self.look_for_leavers()
        return bool(self._replacements.ready) or bool(self._leaving)

    def wants_border(self) -> bool:
        """During a call, several times a second: is there a reason to stop at a batch border?"""
        if not self._table.group.elastic:
            return False
        if self._elastic.grow is True:
            self._replacements.look(self.missing)
        self.look_for_leavers()
        return bool(self._leaving) or (self._elastic.grow is True and self._replacements.gathered())

    def resize(self, count: int) -> None:
        """By hand: too many leave now, missing ones are recruited and awaited."""
        self._table.target = count
        seated = self._table.seated()
        self._leaving |= dict.fromkeys(seated[count:], "shrink")
        if self.missing <= 0:
            self._replacements.dismiss_all()
        self._replacements.look_at_once()
        started = self._table.clock()
        said, self._replacements.stuck = False, ""
        while len(self._replacements.ready) < self.missing:
            self._replacements.look(self.missing)
            self._table.pump(0.1)
            waited = self._table.clock() - started
            lacking = self.missing - len(self._replacements.ready)
            if lacking <= 0:
                break
            if self._replacements.stuck and self._replacements.starting == 0:
                self._table.target = len(seated)
                raise WorkerStartError(unfinished_story([self._replacements.stuck]))
            if waited > self._limits.start_s:
                story = self._standing.shortage(lacking)
                self._table.target = len(seated)
                raise ResourceError(story)
            said = said or (self._replacements.starting == 0 and self._standing.say_waiting(lacking, waited))

    def let_go(self, workers: Sequence[str]) -> None:
        """By hand: exactly these leave, and are not replaced."""
        self._table.target -= len(workers)
        self._leaving |= dict.fromkeys(workers, "shrink")

    def reason(self) -> str:
        """Why the next change is to be."""
        return next(iter(self._leaving.values()), "growth")

    def change(self) -> bool:
        """Everybody stands at a border. False when somebody was lost on the way, or nobody can stay as he is."""
        if not self._in_place:
            self._leaving = {}
            return False
        started = self._table.clock()
        seated = self._table.seated()
        leavers = [worker for worker in seated if worker in self._leaving]
        reason = self._leaving[leavers[0]] if leavers else "growth"
        stay = [worker for worker in seated if worker not in self._leaving]
        newcomers = self._replacements.take(max(self._table.target - len(stay), 0))
        self._leaving = {}
        at = self._table.members[seated[0]].progress
        ranks = tuple(self._table.members[worker].rank or 0 for worker in leavers)
        if not stay:
            self._hand_over(leavers[0], newcomers)
        stood = False
        try:
            stood = bool(stay or newcomers) and self._standing.form([*stay, *newcomers])
        finally:
            if not stood:
                self._replacements.take_back(newcomers)
            for worker in leavers:
                self._table.dismiss(worker)
        if stood:
            self._log.note(
                reason,
                lost=ranks,
                before=len(seated),
                after=len(stay) + len(newcomers),
                in_place=bool(stay),
                since=started,
                at=at,
            )
        return stood

    def rescue(self, worker: str) -> bool:
        """Keep the state of a worker that is about to go as the snapshot. Return whether it gave its state."""
        outcome = self._table.ask([worker], "state", {}, limit_s=self._limits.setup_s)[worker]
        if not isinstance(outcome, Ok):
            return False
        data, call = bytes(outcome.value.data), self._table.current_call
        self._table.snapshots.offer(Snapshot(data, outcome.progress, call=call))
        return True

    def _hand_over(self, leaver: str, newcomers: list[str]) -> None:
        self.rescue(leaver)
        snapshot = self._table.snapshots.latest()
        if snapshot is None or not newcomers:
            return
        self._standing.former.give(newcomers, Blob(snapshot.data))

    def look_for_leavers(self) -> None:
        """Several times a second. Raise `ClusterError` when Ray has not answered for too long."""
        seated = [self._table.members[worker] for worker in self._table.seated()]
        self._leaving |= {m.worker: "preemption" for m in seated if m.notice}
        if self._table.group.elastic:
            draining = self._table.group.draining()
            self._leaving |= {m.worker: "preemption" for m in seated if m.node in draining}
