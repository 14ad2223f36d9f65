"""Make planned changes: at a batch boundary, replacements join and leaving workers leave. Nothing is redone. Driver."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raysgd.config import ElasticConfig, Limits
from raysgd.core.policy import Observation, Recovery, is_time_to_leave, leave_within_s
from raysgd.core.protocols import Call
from raysgd.engine.failure import check_can_fit, no_room_error, unfinished_error, warn_no_room
from raysgd.engine.generation import Generation
from raysgd.engine.recovery_log import RecoveryLog
from raysgd.engine.replacements import Replacements
from raysgd.engine.worker_table import WorkerTable


@dataclass(frozen=True)
class Leaver:
    """Why a member is to leave, when its machine will be stopped (None: unknown), when it must have left, and what has
    announced that: its SIGTERM, or Ray, which drains its node."""

    reason: str
    deadline: float | None = None
    leave_by: float = -math.inf
    sigterm: bool = False
    drained: bool = False


class Membership:
    """Owns how many workers there should be, which ones are to leave and why, and which of these know it. Never stops a
    call: the call asks it whether there is a reason to stop.

    A preempted worker stays until its replacement is ready, or until it must leave. `notice` is the function of a
    replica that is called with the seconds left, at a batch boundary, when its machine will be stopped."""

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
        notice: Callable[..., Any] | None,
    ) -> None:
        self._table, self._generation, self._replacements, self._log = table, generation, replacements, log
        self._elastic, self._limits, self._in_place = elastic, limits, in_place
        self._target, self._notice = target, notice
        self._leaving: dict[str, Leaver] = {}
        self._told: set[str] = set()

    @property
    def target(self) -> int:
        """Return how many workers there should be."""
        return self._target

    @property
    def missing(self) -> int:
        """Return how many places are free, or will be when the members that leave have left."""
        return self._target - sum(worker not in self._leaving for worker in self._table.members())

    def due(self) -> bool:
        """Return, before a call, whether there is a change to make now."""
        self.look_for_leavers()
        self.start_replacements()
        return self._has_change(joins=min(self.missing, self._replacements.ready) > 0)

    def wants_boundary(self) -> bool:
        """Return, several times a second during a call, whether there is a reason to stop at a batch boundary."""
        if not self._table.group.elastic:
            return False
        self.look_for_leavers()
        if self._elastic.grow is True:
            self._replacements.look(self.missing)
        return self._has_change(joins=self._elastic.grow is True and self._replacements.gathered(self.missing))

    def start_replacements(self) -> None:
        """Start the workers and hot spares that are missing, as far as the settings allow it and the cluster has room."""
        if self._elastic.grow and self._table.group.elastic:
            self._replacements.look(self.missing)

    def give_up_spares(self) -> None:
        """End all workers that are not in the group, because another trainer needs their resources."""
        self._replacements.dismiss_all()

    def look_for_leavers(self) -> None:
        """Note which members' nodes will be removed. Raise `ClusterError` if Ray has not answered for too long."""
        members = self._table.members()
        if self._leaving:
            kept = set(members)
            self._leaving = {worker: leaver for worker, leaver in self._leaving.items() if worker in kept}
        draining = self._table.group.draining()
        for info in map(self._table.__getitem__, members):
            known, sigterm, drained = self._leaving.get(info.worker), info.notice, info.node in draining
            if not (sigterm or drained):
                continue
            if known is not None and (known.reason == "shrink" or (known.sigterm, known.drained) == (sigterm, drained)):
                continue
            left_s, now = draining.get(info.node), self._table.clock()
            # SIGTERM on a machine that Ray was already draining says that less time is left than Ray has announced.
            ends_now = sigterm and known is not None and not known.sigterm
            leave_by = now + leave_within_s(None if ends_now else left_s)
            self._leaving[info.worker] = Leaver(
                "preemption",
                None if left_s is None else now + left_s,
                leave_by if known is None else min(leave_by, known.leave_by),
                sigterm,
                drained,
            )
            self._replacements.look_at_once()
        self._replacements.dismiss_preempted(draining)

    def _has_change(self, *, joins: bool) -> bool:
        return bool(self._untold()) or (bool(self._leaving_now()) if self._leaving else joins)

    def _leaving_now(self) -> dict[str, Leaver]:
        """Return those that leave at the next boundary: all of them, or those whose time is up, while the others wait for
        their replacements. A backend that needs new processes changes all at once."""
        now, grows = self._table.clock(), self._elastic.grow is True
        missing, ready, starting = self.missing, self._replacements.ready, self._replacements.starting

        def leaves(each: Leaver) -> bool:
            left_s = each.leave_by - now
            return is_time_to_leave(missing=missing, ready=ready, starting=starting, left_s=left_s, grows=grows)

        now_leaving = {worker: leaver for worker, leaver in self._leaving.items() if leaves(leaver)}
        return self._leaving if now_leaving and not self._in_place else now_leaving

    def _untold(self) -> list[str]:
        """Return the preempted members whose operators do not know it yet."""
        preempted = [worker for worker, leaver in self._leaving.items() if leaver.reason == "preemption"]
        return [worker for worker in preempted if worker not in self._told] if self._notice is not None else []

    def _tell(self, untold: Sequence[str]) -> bool:
        """Call the function for preemption notices on these members. Return False if one of them has failed."""
        self._told |= set(untold)
        now = self._table.clock()

        def call(worker: str) -> dict[str, Any]:
            deadline = self._leaving[worker].deadline
            left_s = None if deadline is None else max(deadline - now, 0.0)
            assert self._notice is not None
            return {"call": Call(self._notice, {"deadline_s": left_s})}

        return self._generation.call(untold, call)

    # -- changes that the user asks for ---------------------------------------------------------------

    def resize(self, count: int) -> None:
        """Set the number of workers. Preempted ones will leave now, and then the last ones, if there are too many. If
        some are missing, wait for them."""
        self.look_for_leavers()
        members = self._table.members()
        if count > len(members):
            check_can_fit(self._table.group, count)
        self._target = count
        staying = [worker for worker in members if worker not in self._leaving]
        self._leaving = {worker: replace(leaver, leave_by=-math.inf) for worker, leaver in self._leaving.items()}
        self._leaving |= dict.fromkeys(staying[count:], Leaver("shrink"))
        if self.missing <= 0:
            self._replacements.keep(0)
        self._replacements.look_at_once()
        self._wait_for_replacements()

    def _wait_for_replacements(self) -> None:
        started, limit_s = self._table.clock(), self._limits.start_s
        warned = False
        places = self._target - len(self._table.members())  # preempted members' replacements may join later
        while self._replacements.ready < places:
            self._replacements.look(self.missing)
            self._table.pump(0.1)
            waited = self._table.clock() - started
            lacking = places - self._replacements.ready
            if lacking <= 0:
                break
            if self._replacements.unfinished and self._replacements.starting == 0:
                raise unfinished_error([self._replacements.unfinished])
            if waited > limit_s:
                no_room = self._replacements.starting < lacking
                raise no_room_error(self._table.group, lacking, self._target, limit_s, no_room=no_room)
            if self._replacements.starting == 0:
                warned = warned or warn_no_room(self._table.group, lacking, waited, limit_s)

    def remove(self, workers: Sequence[str]) -> None:
        """Mark exactly these workers as leaving, without replacements. For those that have failed, and may have been
        replaced, the last ones leave."""
        self._target -= len(workers)
        self._leaving |= dict.fromkeys(workers, Leaver("shrink"))
        staying = [worker for worker in self._table.members() if worker not in self._leaving]
        self._leaving |= dict.fromkeys(staying[self._target :], Leaver("shrink"))

    def give_up_change(self, target: int) -> None:
        """Note that an error has ended the change that the user asked for. Unless it was made already, there should be
        `target` workers again, as before, and nobody leaves for it."""
        kept = {worker: leaver for worker, leaver in self._leaving.items() if leaver.reason != "shrink"}
        if kept == self._leaving and len(self._table.members()) == self._target:
            return
        self._target, self._leaving = target, kept
        self._replacements.keep(self.missing)  # what has started for it must not join in the next call

    # -- changing -------------------------------------------------------------------------------------

    def change(self, call: int) -> Observation:
        """Tell preempted workers that they are, and form the next generation, with the replacements and without the
        workers that leave, while all ranks are at a boundary. Return an observation: "done", or "broken" if a recovery
        must follow."""
        untold = self._untold()
        if untold and not self._tell(untold):
            return self._not_made("preemption")
        leaving = self._leaving_now()
        if not leaving if self._leaving else min(self.missing, self._replacements.ready) <= 0:
            return Observation("done")  # the leavers' replacements are not ready yet, or those that were have failed
        self._leaving = {worker: leaver for worker, leaver in self._leaving.items() if worker not in leaving}
        members = self._table.members()
        leavers = [worker for worker in members if worker in leaving]
        ranks = tuple(self._table[worker].rank or 0 for worker in leavers)
        reason = leaving[leavers[0]].reason if leavers else "growth"
        if not self._in_place:
            detail = "a planned change of members: this backend needs new processes for it"
            return Observation("broken", leaving_ranks=ranks, reason=reason, detail=detail)
        started = self._table.clock()
        stay = [worker for worker in members if worker not in leaving]
        joining = self._replacements.take(max(self._target - len(stay), 0))
        at = self._table[members[0]].progress
        self._generation.take_seconds()  # of the notices
        with self._table.during("change" if leavers else "growth"):
            made = self._replace(stay, leavers, joining, call)
        if not made:
            self._leaving |= leaving  # those that are still members
            return self._not_made(reason)
        change = Recovery(
            reason=reason,
            removed_ranks=ranks,
            world_size_before=len(members),
            world_size_after=len(stay) + len(joining),
            in_place=bool(stay),
            batches_redone=0,
            seconds=round(self._table.clock() - started, 4),
            epoch=at.epoch,
            batch=at.batches,
            step=at.step,
            phases=self._generation.take_seconds(),
        )
        self._log.record(change)
        return Observation("done")

    def _not_made(self, change: str) -> Observation:
        """Return why this change was not made: a member has failed. If only workers that were to join have failed, or none,
        that is no failure of the training."""
        failed = sorted(self._table.failed(), key=lambda info: not info.in_group)
        if not failed:
            return Observation("broken", reason=change, detail="the workers could not form a new process group")
        failure = self._table.failure_of(failed[0])
        if failed[0].in_group:
            return Observation("broken", reason=failure.reason, detail=failure.cause)
        return Observation("broken", reason=change, detail=f"a worker that was to join has failed: {failure.cause}")

    def _replace(self, stay: list[str], leavers: list[str], joining: list[str], call: int) -> bool:
        """Return whether the new generation was formed. The leavers are dismissed, unless they are all members and could
        not hand their state over: then a recovery continues with those that are left."""
        formed = handed = False
        try:
            if stay and self._generation.lacks_shards(stay):
                handed = self._generation.hand_over(stay)
            else:
                handed = bool(stay) or self._hand_over(leavers, joining, call)
            formed = handed and bool(stay or joining) and self._generation.form([*stay, *joining])
        finally:
            if not formed:
                self._replacements.take_back(joining)
            for worker in leavers if handed else ():
                self._table.dismiss(worker)
        return formed

    def _hand_over(self, leavers: list[str], joining: list[str], call: int) -> bool:
        """Pass the state from a leaving worker to the joining ones. Return False if that failed."""
        if not any(self._generation.rescue_state(leaver, call) for leaver in leavers):
            return False
        snapshot = self._table.snapshots.latest()
        return not joining or (snapshot is not None and self._generation.load_snapshot(joining, snapshot))
