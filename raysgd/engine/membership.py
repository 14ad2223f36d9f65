"""Planned changes: newcomers in, leavers out, at a batch border. Nothing is lost, nothing is redone."""

from __future__ import annotations

from collections.abc import Sequence

from raysgd.config import ElasticConfig, Limits
from raysgd.engine.crew import Crew
from raysgd.engine.failure import unfinished_story
from raysgd.engine.ledger import Ledger
from raysgd.engine.recruiter import Recruiter
from raysgd.engine.standing import Standing
from raysgd.errors import ResourceError, WorkerStartError
from raysgd.outcomes import Ok
from raysgd.snapshot import Snapshot
from raysgd.workers.blob import Blob

__all__ = ["Membership"]


class Membership:
    """Owns who is to leave. Asks nobody to stop by itself: the watch asks it whether there is a reason to."""

    def __init__(
        self,
        crew: Crew,
        standing: Standing,
        recruiter: Recruiter,
        ledger: Ledger,
        *,
        elastic: ElasticConfig,
        limits: Limits,
        in_place: bool = True,
    ) -> None:
        self._crew, self._standing, self._recruiter, self._ledger = crew, standing, recruiter, ledger
        self._elastic, self._limits, self._in_place = elastic, limits, in_place
        self._leaving: dict[str, str] = {}

    @property
    def missing(self) -> int:
        return self._crew.target - len(self._crew.seated())

    def due(self) -> bool:
        """Before a call: is there a change to be made right away?"""
        if self._elastic.grow and self._crew.group.elastic:
            self._recruiter.look(self.missing)
        self.look_for_leavers()
        return bool(self._recruiter.ready) or bool(self._leaving)

    def wants_border(self) -> bool:
        """During a call, several times a second: is there a reason to stop at a batch border?"""
        if not self._crew.group.elastic:
            return False
        if self._elastic.grow is True:
            self._recruiter.look(self.missing)
        self.look_for_leavers()
        return bool(self._leaving) or (self._elastic.grow is True and self._recruiter.gathered())

    def resize(self, count: int) -> None:
        """By hand: too many leave now, missing ones are recruited and awaited."""
        self._crew.target = count
        seated = self._crew.seated()
        self._leaving |= dict.fromkeys(seated[count:], "shrink")
        if self.missing <= 0:
            self._recruiter.dismiss_all()
        self._recruiter.look_at_once()
        started = self._crew.clock()
        said, self._recruiter.stuck = False, ""
        while len(self._recruiter.ready) < self.missing:
            self._recruiter.look(self.missing)
            self._crew.pump(0.1)
            waited = self._crew.clock() - started
            lacking = self.missing - len(self._recruiter.ready)
            if lacking <= 0:
                break
            if self._recruiter.stuck and self._recruiter.starting == 0:
                self._crew.target = len(seated)
                raise WorkerStartError(unfinished_story([self._recruiter.stuck]))
            if waited > self._limits.start_s:
                story = self._standing.shortage(lacking)
                self._crew.target = len(seated)
                raise ResourceError(story)
            said = said or (self._recruiter.starting == 0 and self._standing.say_waiting(lacking, waited))

    def let_go(self, workers: Sequence[str]) -> None:
        """By hand: exactly these leave, and are not replaced."""
        self._crew.target -= len(workers)
        self._leaving |= dict.fromkeys(workers, "shrink")

    def reason(self) -> str:
        """Why the next change is to be."""
        return next(iter(self._leaving.values()), "growth")

    def change(self) -> bool:
        """Everybody stands at a border. False when somebody was lost on the way, or nobody can stay as he is."""
        if not self._in_place:
            self._leaving = {}
            return False
        started = self._crew.clock()
        seated = self._crew.seated()
        leavers = [worker for worker in seated if worker in self._leaving]
        reason = self._leaving[leavers[0]] if leavers else "growth"
        stay = [worker for worker in seated if worker not in self._leaving]
        newcomers = self._recruiter.take(max(self._crew.target - len(stay), 0))
        self._leaving = {}
        at = self._crew.members[seated[0]].progress
        ranks = tuple(self._crew.members[worker].rank or 0 for worker in leavers)
        if not stay:
            self._hand_over(leavers[0], newcomers)
        stood = False
        try:
            stood = bool(stay or newcomers) and self._standing.form([*stay, *newcomers])
        finally:
            if not stood:
                self._recruiter.take_back(newcomers)
            for worker in leavers:
                self._crew.dismiss(worker)
        if stood:
            self._ledger.note(
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
        outcome = self._crew.ask([worker], "state", {}, limit_s=self._limits.setup_s)[worker]
        if not isinstance(outcome, Ok):
            return False
        data, call = bytes(outcome.value.data), self._crew.current_call
        self._crew.snapshots.offer(Snapshot(data, outcome.progress, call=call))
        return True

    def _hand_over(self, leaver: str, newcomers: list[str]) -> None:
        self.rescue(leaver)
        snapshot = self._crew.snapshots.latest()
        if snapshot is None or not newcomers:
            return
        self._standing.former.give(newcomers, Blob(snapshot.data))

    def look_for_leavers(self) -> None:
        """Several times a second. Raise `ClusterError` when Ray has not answered for too long."""
        seated = [self._crew.members[worker] for worker in self._crew.seated()]
        self._leaving |= {m.worker: "preemption" for m in seated if m.notice}
        if self._crew.group.elastic:
            draining = self._crew.group.draining()
            self._leaving |= {m.worker: "preemption" for m in seated if m.node in draining}
