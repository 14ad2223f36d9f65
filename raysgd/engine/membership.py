"""Make planned changes: at a batch boundary, replacements join and leaving workers leave. Nothing is redone. Driver."""

from __future__ import annotations

from collections.abc import Sequence

from raysgd.config import ElasticConfig, Limits
from raysgd.core.policy import Observation, Recovery
from raysgd.engine.failure import check_can_fit, no_room_error, unfinished_error, warn_no_room
from raysgd.engine.generation import Generation
from raysgd.engine.recovery_log import RecoveryLog
from raysgd.engine.replacements import Replacements
from raysgd.engine.worker_table import WorkerTable
from raysgd.errors import ResourceError, WorkerStartError

__all__ = ["Membership"]


class Membership:
    """Owns how many workers there should be, and which ones are to leave and why. Never stops a call: the call asks it
    whether there is a reason to stop."""

    def __init__(
        self,
        table: WorkerTable,
        generation: Generation,
        replacements: Replacements,
        log: RecoveryLog,
        *,
        target: int,
        elastic: ElasticConfig,
        limits: Limits,
        in_place: bool,
    ) -> None:
        self._table, self._generation, self._replacements, self._log = table, generation, replacements, log
        self._elastic, self._limits, self._in_place = elastic, limits, in_place
        self._target = target
        self._leaving: dict[str, str] = {}

    @property
    def target(self) -> int:
        """Return how many workers there should be."""
        return self._target

    @property
    def missing(self) -> int:
        return self._target - len(self._table.members())

    def due(self) -> bool:
        """Return, before a call, whether there is a change to make now."""
        if self._elastic.grow and self._table.group.elastic:
            self._replacements.look(self.missing)
        self.look_for_leavers()
        return self._replacements.ready > 0 or bool(self._leaving)

    def wants_boundary(self) -> bool:
        """Return, several times a second during a call, whether there is a reason to stop at a batch boundary."""
        if not self._table.group.elastic:
            return False
        if self._elastic.grow is True:
            self._replacements.look(self.missing)
        self.look_for_leavers()
        return bool(self._leaving) or (self._elastic.grow is True and self._replacements.gathered())

    def look_for_leavers(self) -> None:
        """Note which members' nodes will be removed. Raise `ClusterError` if Ray has not answered for too long."""
        members = [self._table[worker] for worker in self._table.members()]
        self._leaving |= {info.worker: "preemption" for info in members if info.notice}
        if self._table.group.elastic:
            draining = self._table.group.draining()
            self._leaving |= {info.worker: "preemption" for info in members if info.node in draining}

    # -- changes that the user asks for ---------------------------------------------------------------

    def resize(self, count: int) -> None:
        """Set the number of workers. If there are too many, the last ones will leave; if some are missing, wait for
        them."""
        members = self._table.members()
        if count > len(members):
            check_can_fit(self._table.group, count)
        before, self._target = self._target, count
        self._leaving |= dict.fromkeys(members[count:], "shrink")
        if self.missing <= 0:
            self._replacements.dismiss_all()
        self._replacements.look_at_once()
        try:
            self._wait_for_replacements()
        except (ResourceError, WorkerStartError):
            self._target = before
            self._replacements.keep(
                self.missing
            )  # what has started must not join in the next call as if it had been asked for
            raise

    def _wait_for_replacements(self) -> None:
        started, limit_s = self._table.clock(), self._limits.start_s
        warned = False
        while self._replacements.ready < self.missing:
            self._replacements.look(self.missing)
            self._table.pump(0.1)
            waited = self._table.clock() - started
            lacking = self.missing - self._replacements.ready
            if lacking <= 0:
                break
            if self._replacements.unfinished and self._replacements.starting == 0:
                raise unfinished_error([self._replacements.unfinished])
            if waited > limit_s:
                raise no_room_error(self._table.group, lacking, self._target, limit_s)
            if self._replacements.starting == 0:
                warned = warned or warn_no_room(self._table.group, lacking, waited, limit_s)

    def remove(self, workers: Sequence[str]) -> None:
        """Mark exactly these workers as leaving, without replacements."""
        self._target -= len(workers)
        self._leaving |= dict.fromkeys(workers, "shrink")

    # -- changing -------------------------------------------------------------------------------------

    def change(self, call: int) -> Observation:
        """Form the next generation, with the replacements and without the workers that leave, while all ranks are at a
        boundary. Return an observation: "done", or "broken" if a recovery must follow."""
        leaving, self._leaving = self._leaving, {}
        if not self._in_place:
            reason = next(iter(leaving.values()), "growth")
            detail = "a planned change of members: this backend needs new processes for it"
            return Observation("broken", reason=reason, detail=detail)
        started = self._table.clock()
        members = self._table.members()
        leavers = [worker for worker in members if worker in leaving]
        stay = [worker for worker in members if worker not in leaving]
        joining = self._replacements.take(max(self._target - len(stay), 0))
        at = self._table[members[0]].progress
        ranks = tuple(self._table[worker].rank or 0 for worker in leavers)
        if not self._replace(stay, leavers, joining, call):
            detail = "workers left, or failed, in a planned change"
            return Observation("broken", reason="preemption", detail=detail)
        change = Recovery(
            reason=leaving[leavers[0]] if leavers else "growth",
            removed_ranks=ranks,
            world_size_before=len(members),
            world_size_after=len(stay) + len(joining),
            in_place=bool(stay),
            batches_redone=0,
            seconds=round(self._table.clock() - started, 4),
            epoch=at.epoch,
            batch=at.batches,
        )
        self._log.record(change)
        return Observation("done")

    def _replace(self, stay: list[str], leavers: list[str], joining: list[str], call: int) -> bool:
        """Return whether the new generation was formed. The leavers are dismissed in any case."""
        if not stay:
            self._hand_over(leavers[0], joining, call)
        formed = False
        try:
            formed = bool(stay or joining) and self._generation.form([*stay, *joining])
        finally:
            if not formed:
                self._replacements.take_back(joining)
            for worker in leavers:
                self._table.dismiss(worker)
        return formed

    def _hand_over(self, leaver: str, joining: list[str], call: int) -> None:
        """Pass the state from one leaving worker to the joining ones, because all members leave."""
        self._generation.rescue_state(leaver, call)
        snapshot = self._table.snapshots.latest()
        if snapshot is not None and joining:
            self._generation.load_snapshot(joining, snapshot)
