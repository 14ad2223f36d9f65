"""Decide how many workers there should be, and which ones leave when. Driver."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from raysgd.config import ElasticConfig
from raysgd.core.decisions.policy import Observation, is_time_to_leave, leave_within_s
from raysgd.core.protocols import Call
from raysgd.engine.failure import check_can_fit, no_room_error, unfinished_error, warn_no_room
from raysgd.engine.generation import Generation
from raysgd.engine.replacements import Replacements
from raysgd.engine.worker_info import Leaver, WorkerInfo
from raysgd.engine.worker_table import WorkerTable


class Membership:
    """Owns how many workers there should be, and decides which ones are to leave, and when. Never
    stops a call: the call asks it whether there is a reason to stop. Never makes a change: a
    recovery does.

    A preempted worker stays until its replacement is ready, or until it must leave. `notice` is the
    function of a replica that is called with the seconds left, at a batch boundary, when its
    machine will be stopped."""

    def __init__(
        self,
        table: WorkerTable,
        generation: Generation,
        replacements: Replacements,
        *,
        target: int,
        elastic: ElasticConfig,
        notice: Callable[..., Any] | None,
    ) -> None:
        self._table, self._generation, self._replacements = table, generation, replacements
        self.target, self._elastic, self._notice = target, elastic, notice  # how many workers there should be

    @property
    def least(self) -> int:
        """With how many workers training continues."""
        return min(self._elastic.min_workers, self.target)

    @property
    def missing(self) -> int:
        """How many places are free, or will be when the members that leave have left."""
        return self.target - len(self._find_staying())

    def _leavers(self) -> dict[WorkerInfo, Leaver]:
        """The members that are to leave, in rank order, and why."""
        infos = map(self._table.__getitem__, self._table.members())
        return {info: info.leaver for info in infos if info.leaver is not None}

    def _find_staying(self) -> list[str]:
        return [worker for worker in self._table.members() if self._table[worker].leaver is None]

    def has_change(self) -> bool:
        """Return, before a call, whether there is a change to make now."""
        self.look_for_leavers()
        self.start_replacements()
        return self._must_change(joins=min(self.missing, self._replacements.ready) > 0)

    def wants_boundary(self) -> bool:
        """Whether to stop at a boundary. Asked often in a call, after `look_for_leavers`."""
        if not self._table.group.elastic:
            return False
        self.start_replacements()
        return self._must_change(joins=self._elastic.grow is True and self._replacements.should_join(self.missing))

    def start_replacements(self) -> None:
        """Start missing workers and hot spares, as far as settings and the cluster allow it."""
        if self._elastic.grow and self._table.group.elastic:
            self._replacements.look(self.missing)

    def look_for_leavers(self) -> None:
        """Note whose nodes will be removed. Raise `ClusterError` if Ray does not answer."""
        draining = self._table.group.draining()
        for info in map(self._table.__getitem__, self._table.members()):
            known, sigterm, drained = info.leaver, info.notice, info.node in draining
            if not (sigterm or drained):
                continue
            if known is not None and (known.reason == "shrink" or (known.sigterm, known.drained) == (sigterm, drained)):
                continue
            left_s, now = draining.get(info.node), self._table.real_clock()
            # SIGTERM on a machine that Ray was already draining says that less time is left than Ray has announced.
            ends_now = sigterm and known is not None and not known.sigterm
            leave_by = now + leave_within_s(None if ends_now else left_s)
            leaver = Leaver(
                "preemption",
                None if left_s is None else now + left_s,
                leave_by if known is None else min(leave_by, known.leave_by),
                sigterm,
                drained,
                notified=known is not None and known.notified,
            )
            self._table.set_leaver(info.worker, leaver)
            self._replacements.look_at_once()
        self._replacements.dismiss_preempted(draining)

    def _must_change(self, *, joins: bool) -> bool:
        return bool(self._find_unnotified()) or (bool(self._choose_leaving()) if self._leavers() else joins)

    def _choose_leaving(self) -> list[WorkerInfo]:
        """Return those that leave at the next boundary: all, or those whose time is up. A backend
        that needs new processes changes all at once."""
        now, grows, leavers = self._table.real_clock(), self._elastic.grow is True, self._leavers()
        missing, ready, starting = self.missing, self._replacements.ready, self._replacements.starting
        enough = len(self._find_staying()) + ready >= self.least

        def leaves(each: Leaver) -> bool:
            left_s = each.leave_by - now
            return is_time_to_leave(
                missing=missing, ready=ready, starting=starting, left_s=left_s, grows=grows, enough=enough
            )

        leaving = [info for info, leaver in leavers.items() if leaves(leaver)]
        return list(leavers) if leaving and not self._generation.in_place else leaving

    def _find_unnotified(self) -> dict[WorkerInfo, Leaver]:
        """Return the preempted members whose operators do not know it yet."""
        preempted = {info: each for info, each in self._leavers().items() if each.reason == "preemption"}
        return {info: each for info, each in preempted.items() if not each.notified} if self._notice is not None else {}

    def _notify(self, waiting: dict[WorkerInfo, Leaver]) -> bool:
        """Tell these members' operators of their preemption. Return False if one has failed."""
        now, calls = self._table.real_clock(), dict[str, Any]()
        for info, leaver in waiting.items():
            self._table.set_leaver(info.worker, replace(leaver, notified=True))
            left_s = None if leaver.deadline is None else max(leaver.deadline - now, 0.0)
            assert self._notice is not None
            calls[info.worker] = {"call": Call(self._notice, {"deadline_s": left_s})}
        return self._generation.call(list(calls), calls.__getitem__)

    # -- changes that the user asks for ---------------------------------------------------------------

    def resize(self, count: int) -> None:
        """Set the number of workers. Preempted ones will leave now, and then the last ones, if
        there are too many. If some are missing, wait for them."""
        self.look_for_leavers()
        members = self._table.members()
        if count > len(members):
            check_can_fit(self._table.group, count)
        self.target = count
        surplus = self._find_staying()[count:]
        for info, leaver in self._leavers().items():
            self._table.set_leaver(info.worker, replace(leaver, leave_by=-math.inf))
        for worker in surplus:
            self._table.set_leaver(worker, Leaver("shrink"))
        if self.missing <= 0:
            self._replacements.keep(0)
        self._replacements.look_at_once()
        self._wait_for_replacements()

    def _wait_for_replacements(self) -> None:
        started, limit_s = self._table.clock(), self._generation.limits.start_s
        warned = False
        places = self.target - len(self._table.members())  # preempted members' replacements may join later
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
                raise no_room_error(self._table.group, lacking, self.target, limit_s, no_room=no_room)
            if self._replacements.starting == 0:
                warned = warned or warn_no_room(self._table.group, lacking, waited, limit_s)

    def give_up_change(self, target: int) -> None:
        """Note that an error has ended the change that the user asked for. Unless it was made
        already, there should be `target` workers again, as before, and no worker leaves for it."""
        asked = [info for info, leaver in self._leavers().items() if leaver.reason == "shrink"]
        if not asked and len(self._table.members()) == self.target:
            return
        self.target = target
        for info in asked:
            self._table.set_leaver(info.worker, None)
        self._replacements.keep(self.missing)  # what has started for it must not join in the next call

    # -- the change that is due ------------------------------------------------------------------------

    def plan(self) -> Observation:
        """Plan the change that is due, with all ranks at a boundary: "paused" with the members that
        leave, "done" for none, "broken" if the backend needs new processes. Notify preempted
        workers; if that fails, no member leaves now, and the generation is formed again."""
        waiting = self._find_unnotified()
        if waiting and not self._notify(waiting):
            return Observation("paused", reason="preemption")  # a member has failed, or the network has
        leaving = self._choose_leaving()
        if not leaving if self._leavers() else min(self.missing, self._replacements.ready) <= 0:
            return Observation("done")  # the leavers' replacements are not ready yet, or those that were have failed
        leaver = leaving[0].leaver if leaving else None
        reason, workers = "growth" if leaver is None else leaver.reason, tuple(info.worker for info in leaving)
        if self._generation.in_place:
            return Observation("paused", leaving=workers, reason=reason)
        detail = "a planned change of members: this backend needs new processes for it"
        return Observation("broken", leaving=workers, reason=reason, detail=detail)
