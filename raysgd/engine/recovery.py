"""Form the next generation, after a failure or for a planned change, or raise an error that lists
the failures. Driver."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NoReturn

from raysgd.config import ElasticConfig
from raysgd.core.outcomes import DATA_LOADER
from raysgd.core.policy import (
    MAX_HANGS,
    PHASES,
    GiveUp,
    Observation,
    Recovery,
    Rejoin,
    Restart,
    Situation,
    backoff,
    decide,
)
from raysgd.core.progress import Progress, most_advanced
from raysgd.core.snapshot import Snapshot
from raysgd.engine.call import RunningCall
from raysgd.engine.failure import failed_error, raise_user_error, unfinished_error
from raysgd.engine.generation import Generation
from raysgd.engine.membership import Membership
from raysgd.engine.recovery_log import PLANNED, RecoveryLog
from raysgd.engine.replacements import Replacements
from raysgd.engine.worker_table import Stage, WorkerInfo, WorkerTable
from raysgd.errors import HangError, TrainingFailedError, counted, ranked

logger = logging.getLogger("raysgd")

LOOK_S = 0.25


class RecoveryLoop:
    """Carries out what `policy.decide` decides, until the group is up. Owns nothing between two
    recoveries. A planned change is a recovery in which nothing has failed, and some members may
    leave.

    Each pass starts with the workers that are there now, so that a further failure during the
    recovery only means another pass."""

    def __init__(
        self,
        table: WorkerTable,
        generation: Generation,
        replacements: Replacements,
        membership: Membership,
        log: RecoveryLog,
        *,
        elastic: ElasticConfig,
        in_place: bool,
        jitter: Callable[[], float],
    ) -> None:
        self._table, self._generation, self._replacements = table, generation, replacements
        self._membership, self._log = membership, log
        self._elastic, self._in_place, self._jitter = elastic, in_place, jitter

    def recover(self, seen: Observation, call: RunningCall, *, since: float, world: int) -> Snapshot | None:
        """Form the next generation, and return the snapshot that training continues from, or None
        if survivors continue in place. The last one ended at the time `since`, when it had `world`
        workers."""
        members = [self._table[worker] for worker in self._table.members()]
        furthest = max((info.progress for info in members), key=lambda p: p.order, default=Progress())
        if seen.culprit is not None:
            culprit = self._table[seen.culprit]
            seen = replace(seen, detail=f"rank {culprit.rank} on node {culprit.machine}: {seen.detail}")
        case = _Case(seen, call, furthest, world, since, self._generation.take_seconds())
        case.phases["stop"] = self._table.clock() - since - sum(case.phases.values()) + case.phases.get("stop", 0.0)
        self._generation.end()
        self._replacements.forget_failures()
        while not self._generation.up:
            self._dismiss_failed(case)
            if case.seen.leaving and not self._let_leave(case):
                continue
            survivors = self._survivors(case)
            now = self._situation(case, survivors)
            pause = backoff(case.waits, self._elastic.backoff_s, self._elastic.backoff_max_s, self._jitter())
            decision = decide(now, wait_s=pause)
            self._check(case, survivors)
            if isinstance(decision, GiveUp):
                self._give_up(decision.why, case)
            elif isinstance(decision, Rejoin):
                self._rejoin(case, survivors)
            elif isinstance(decision, Restart):
                case.tries += 1
                self._replacements.launch(decision.count)
            else:
                case.waits += self._replacements.starting == 0
                began = self._table.clock()
                self._wait(decision.seconds, now, case)
                case.phases["wait"] = case.phases.get("wait", 0.0) + self._table.clock() - began
        self._note(case, after=len(self._table.members()))
        return case.revived

    def _let_leave(self, case: _Case) -> bool:
        """Dismiss the members that leave, when the others, or the driver, have their part of the
        state. Return False if that failed: then they stay until the next change."""
        leaving, case.seen = case.seen.leaving, replace(case.seen, leaving=())
        if self._in_place:
            stay = [worker for worker in self._table.members() if worker not in leaving]
            if stay and self._generation.lacks_shards(stay):
                handed = self._generation.hand_over(stay)
            else:
                handed = bool(stay) or any(self._generation.rescue_state(each, case.call.number) for each in leaving)
            if not handed:
                case.tries += 1
                return False
        case.left_ranks |= {self._table[worker].rank or 0 for worker in leaving}
        for worker in leaving if self._in_place else ():  # otherwise all are replaced
            self._table.dismiss(worker)
        return True

    def _rejoin(self, case: _Case, survivors: list[str]) -> None:
        """Try once to form a generation. If that fails although no worker has failed, dismiss the
        replacements, because the network between them may be broken; not at the first try of a
        planned change."""
        joining = self._replacements.take(max(self._membership.target - len(survivors), 0))
        formed = False
        try:
            keep = bool(survivors) and not self._generation.lacks_shards(survivors)
            revived = None if keep else self._revive([*survivors, *joining], case.call.number)
            case.revived = revived or case.revived
            state = revived.content() if revived is not None and not self._in_place else None
            formed = (keep or revived is not None) and self._generation.form(
                [*survivors, *joining], state=state or None
            )
            if not formed:
                logger.warning("a new process group could not be formed: %s", self._generation.causes())
        finally:
            if not formed:
                first, case.tries = case.seen.kind == "paused", case.tries + 1
                failed = {info.worker for info in self._table.failed()} & {*survivors, *joining}
                unharmed = not failed and not first
                if first and not failed & set(survivors):  # otherwise it is that failure
                    case.seen = replace(case.seen, kind="broken", detail=self._generation.causes())
                self._replacements.take_back([] if unharmed else joining)
                for worker in joining if unharmed else []:
                    self._table.dismiss(worker)

    def _check(self, case: _Case, survivors: list[str]) -> None:
        """Raise an error if only the user's set-up prevents the recovery, or after too many
        attempts."""
        replacements = self._replacements
        if not survivors and replacements.ready == 0 and replacements.starting == 0:
            if replacements.failure is not None:
                raise_user_error(replacements.failure, WorkerInfo("a new worker"))
            if replacements.unfinished:
                raise unfinished_error([replacements.unfinished])
        if case.tries > self._elastic.max_attempts:
            self._give_up(
                f"{case.tries} attempts in a row to form a new process group failed ({self._generation.causes()})", case
            )

    def _may_end(self, survivors: list[str]) -> bool:
        """Return whether the outcome of those that are starting decides if the user's set-up, which
        has failed in another one, ends the call."""
        replacements = self._replacements
        failed = replacements.failure is not None or bool(replacements.unfinished)
        return failed and not survivors and replacements.ready == 0 and replacements.starting > 0

    def _dismiss_failed(self, case: _Case) -> None:
        """Dismiss the workers that have failed, and log the failure once. Replacements dismiss
        those that were to join later. A planned change in which a member fails is a failure."""
        failed = [info for info in self._table.failed() if info.stage >= Stage.JOINING]
        for info in sorted(failed, key=lambda info: not info.in_group):
            if info.in_group and (case.seen.kind == "paused" or case.seen.leaving):
                failure = self._table.failure_of(info)
                case.seen = Observation("broken", reason=failure.reason, detail=failure.cause)
            if info.in_group and info.rank is not None:
                case.failed_ranks.add(info.rank)
                case.failed_on.add(info.machine)
            self._table.dismiss(info.worker)
        if case.logged or case.seen.kind == "paused":
            return
        case.logged = True
        self._log.on_wait(f"a new process group after: {case.seen.reason}")
        seen, where = case.seen, f"epoch {case.furthest.epoch}, batch {case.furthest.batches}"
        if seen.reason == DATA_LOADER:
            action = "Restarting this loader and continuing after the last committed batch"
            logger.warning("data loader failure in %s: %s. %s", where, seen.detail, action)
        elif seen.reason in PLANNED and not case.failed_ranks:
            logger.info("%s in %s: %s", seen.reason, where, seen.detail)
        else:
            on = f" on node {', '.join(sorted(case.failed_on))}" if case.failed_on else ""
            ranks = ranked(sorted(case.failed_ranks)) if case.failed_ranks else "no rank"
            logger.warning("%s in %s: %s of %d failed%s (%s)", seen.reason, where, ranks, case.world, on, seen.detail)

    def _survivors(self, case: _Case) -> list[str]:
        """Return the members that can continue in place. With a backend whose processes cannot
        rejoin, there are none: their state is saved as a snapshot. There are none either if a shard
        is lost, and there is no snapshot of it."""
        survivors = self._table.members()
        lost = self._generation.lacks_shards(survivors) and self._generation.snapshot_of(survivors) is None
        if survivors and lost:
            logger.warning("no copy of a shard is left, nor a snapshot of it: training starts over with new workers")
        if survivors and (lost or not self._in_place):
            progress = {} if lost else {worker: self._table[worker].progress for worker in survivors}
            while progress and not self._generation.rescue_state(best := most_advanced(progress), case.call.number):
                del progress[best]  # it failed, too, so try the next most advanced one
            for worker in survivors:
                self._table.dismiss(worker)
            self._replace_all(len(survivors))
            survivors = []
        return survivors

    def _replace_all(self, left: int) -> None:
        """Start new processes for all workers. The places of those that were dismissed are free,
        even if Ray does not show this yet."""
        places = min(self._membership.target, max(left, self._table.group.capacity()))
        wanted = places - self._replacements.ready - self._replacements.starting
        if wanted > 0:
            self._replacements.launch(wanted)

    def _situation(self, case: _Case, survivors: list[str]) -> Situation:
        target = self._membership.target
        least = self._membership.least
        short = len(survivors) + self._replacements.ready < least or not survivors
        self._replacements.tick()
        return Situation(
            survivors=len(survivors),
            ready=self._replacements.ready,
            starting=self._replacements.starting,
            free=self._table.group.room() if short and not self._may_end(survivors) else 0,
            target=target,
            min_workers=least,
            failures=self._log.failures_since(case.call.recoveries_before) + (case.seen.reason not in PLANNED),
            max_failures=case.call.max_failures,
            attempts=case.waits,
            max_attempts=self._elastic.max_attempts,
            gathered=self._replacements.gathered(target - len(survivors)),
            hangs=case.seen.hangs,
        )

    def _revive(self, joining: list[str], call: int) -> Snapshot | None:
        """Return the snapshot that these processes start from when no member is left, or members
        lack a shard: the newest one, or an empty one if they all take the initial state of the
        first of them. Return None if they could not load it."""
        snapshot = self._generation.snapshot_of(joining) or Snapshot()
        if self._generation.is_sharded:
            usable = bool(snapshot.data) or snapshot.held is not None
            if usable or not self._table.members():
                self._table.snapshots.forget()  # a newer one may be incomplete, and would be kept instead of later ones
            if usable:
                self._table.snapshots.offer(snapshot)
            return snapshot if not usable or self._generation.load_snapshot(joining, snapshot) else None
        holders = {w: self._table[w].progress for w in joining if self._table[w].holds_state}
        if holders and holders[most_advanced(holders)].order >= snapshot.progress.order:
            return Snapshot(progress=holders[most_advanced(holders)], call=call)
        if not snapshot.data:
            self._table.set_holds_state(joining[0], self._in_place)
        elif self._in_place and not self._generation.load_snapshot(joining, snapshot):
            return None
        return snapshot  # without `in_place`, they take it after they have joined and are set up

    def _wait(self, seconds: float, now: Situation, case: _Case) -> None:
        """Wait for machines, or for replacements that are starting. Return early when their number
        changes."""
        deadline = self._table.clock() + seconds
        if now.starting == 0:
            missing = max(now.min_workers - now.survivors, 1)
            demand = self._table.group.demand(missing)
            self._log.on_wait(f"{counted(missing, 'more worker')}, which need {demand}")
            logger.warning(
                "not enough workers to continue (%d of at least %d): waiting %.1f s for %s, attempt %d of %d",
                now.survivors,
                now.min_workers,
                seconds,
                demand,
                now.attempts + 1,
                now.max_attempts,
            )
        elif now.survivors == 0 and not case.awaits:
            case.awaits = True
            demand = self._table.group.demand(now.starting)
            self._log.on_wait(f"{counted(now.starting, 'new worker')} to start")
            logger.warning("waiting for %s to start; they need %s", counted(now.starting, "new worker"), demand)
        while self._table.clock() < deadline:
            self._table.pump(LOOK_S)
            self._replacements.tick()
            if self._replacements.ready > now.ready or self._replacements.starting < now.starting:
                return
            if now.starting == 0 and self._table.group.room() > now.free:
                return

    def _note(self, case: _Case, *, after: int) -> None:
        base = case.revived.progress.step if case.revived is not None else case.furthest.step
        took = self._generation.take_seconds()
        recovery = Recovery(
            reason=case.seen.reason,
            removed_ranks=tuple(sorted(case.failed_ranks | case.left_ranks)),
            world_size_before=case.world,
            world_size_after=after,
            in_place=case.revived is None,
            batches_redone=max(case.furthest.step - base, 0),
            seconds=round(self._table.clock() - case.since, 4),
            epoch=case.furthest.epoch,
            batch=case.furthest.batches,
            detail=case.seen.detail,
            step=case.furthest.step,
            phases={name: case.phases.get(name, 0.0) + took.get(name, 0.0) for name in PHASES},
        )
        self._log.record(recovery)

    def _give_up(self, why: str, case: _Case) -> NoReturn:
        self._note(case, after=0)
        hangs = case.seen.hangs >= MAX_HANGS
        raise failed_error(
            why, self._log.recoveries[case.call.recoveries_before :], HangError if hangs else TrainingFailedError
        )


@dataclass
class _Case:
    """What is known about one recovery while it runs."""

    seen: Observation
    call: RunningCall
    furthest: Progress
    world: int
    since: float
    phases: dict[str, float] = field(default_factory=dict)  # so far, without what the generation measures now
    failed_ranks: set[int] = field(default_factory=set)
    failed_on: set[str] = field(default_factory=set)  # their machines
    left_ranks: set[int] = field(default_factory=set)
    waits: int = 0
    tries: int = 0
    logged: bool = False
    awaits: bool = False  # the log says that it waits for new workers
    revived: Snapshot | None = None
