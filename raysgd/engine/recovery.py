"""Form the next generation, after a failure or for a planned change, or raise an error that lists
the failures. Keep the list of these recoveries. Driver."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NoReturn

from raysgd.config import ElasticConfig
from raysgd.core.decisions import policy
from raysgd.core.measures.progress import Progress
from raysgd.core.outcomes import BATCH, DATA_LOADER
from raysgd.core.snapshot import Snapshot, newest_state
from raysgd.engine.call import RunningCall
from raysgd.engine.failure import (
    cut_short_error,
    failed_error,
    out_of_step_error,
    raise_user_error,
    unfinished_error,
)
from raysgd.engine.generation import Generation
from raysgd.engine.membership import Membership
from raysgd.engine.replacements import Replacements
from raysgd.engine.worker_info import Stage, WorkerInfo
from raysgd.engine.worker_table import WorkerTable
from raysgd.errors import HangError, TrainingFailedError, counted, ranked

logger = logging.getLogger("raysgd")

LOOK_S = 0.25


class StateLost(Exception):
    """All workers have failed in a takeover: what follows is not this recovery's to decide."""


class RecoveryLog:
    """Owns the list of recoveries. A reason in PLANNED is a planned change, which does not count as
    a failure. `on_wait` is called with what a recovery waits for."""

    def __init__(
        self, on_recovery: Callable[[policy.Recovery], None], on_wait: Callable[[str], None] = lambda what: None
    ) -> None:
        self.recoveries: list[policy.Recovery] = []
        self._on_recovery, self.on_wait = on_recovery, on_wait

    def failures_since(self, count: int) -> int:
        """How many failures there were after the first `count` recoveries."""
        return sum(recovery.reason not in policy.PLANNED for recovery in self.recoveries[count:])

    def record(self, recovery: policy.Recovery, *, revived: Snapshot | None = None, continues: bool = True) -> None:
        """Add a recovery to the list, and report it. Without `continues`, the call ends. What is
        `revived` is the state of new workers, unless training continues in place."""
        self.recoveries.append(recovery)
        before, after = recovery.world_size_before, recovery.world_size_after
        if continues:
            # Without a batch, or a commit of a training function, nothing could have been lost.
            how = f" {_describe_start(revived)}," if recovery.epoch or recovery.step else ""
            how += f" {counted(recovery.batches_redone, 'batch', 'batches')} redone," if recovery.epoch else ""
            logger.warning(
                "%s: %straining continues with %s (%d before),%s after %.2f s",
                recovery.reason,
                _change(recovery),
                counted(after, "worker"),
                before,
                how,
                recovery.seconds,
            )
        else:
            rest = f"{counted(after, 'worker is', 'workers are')} left ({before} before)"
            logger.error("%s: the call ends with an error; %s", recovery.reason, rest)
        self._on_recovery(recovery)


def _change(recovery: policy.Recovery) -> str:
    """The beginning of a log line: which workers have left or joined, or why a batch is trained
    again."""
    if recovery.reason in ("preemption", "shrink"):
        return f"{ranked(recovery.removed_ranks)} left, "
    if recovery.reason == "growth":
        new = recovery.world_size_after - recovery.world_size_before
        return f"{counted(new, 'new worker') if new > 0 else 'no new worker'} joined, "
    return f"{recovery.detail}; " if recovery.reason == BATCH else ""


def _describe_start(revived: Snapshot | None) -> str:
    """Say with which state training continues."""
    if revived is None:
        return "in place"
    if revived.load is not None:
        return "from a checkpoint"
    # Without one, it is the initial state of one of them, or what one has taken from a member that then failed.
    return "from a snapshot" if revived.data else "with the state of a new worker"


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
        jitter: Callable[[], float],
    ) -> None:
        self._table, self._generation, self._replacements = table, generation, replacements
        self._membership, self._log, self._elastic, self._jitter = membership, log, elastic, jitter
        self._in_place = generation.in_place

    def recover(self, seen: policy.Observation, call: RunningCall, *, since: float, world: int) -> Snapshot | None:
        """Form the next generation. Return the snapshot that training continues from, None in
        place. The last one ended at the time `since`, when it had `world` workers."""
        members = [self._table[worker] for worker in self._table.members()]
        furthest = max((info.progress for info in members), key=lambda p: p.order, default=Progress())
        if seen.culprit is not None:
            culprit = self._table[seen.culprit]
            seen = replace(seen, detail=f"rank {culprit.rank} on node {culprit.machine}: {seen.detail}")
        case = _Case(seen, call, furthest, world, since)
        self._generation.note_seconds("stop", self._table.clock() - since - sum(self._generation.seconds.values()))
        self._generation.end()
        self._replacements.forget_failures()
        while not self._generation.up:
            self._dismiss_failed(case)
            if case.seen.leaving and not self._let_leave(case):
                continue
            survivors = self._survivors(case)
            if seen.reason == "takeover" and not survivors and self._table.snapshots.latest() is None:
                raise StateLost
            now = self._situation(case, survivors)
            pause = policy.backoff(case.waits, self._elastic.backoff_s, self._elastic.backoff_max_s, self._jitter())
            decision = policy.decide(now, wait_s=pause)
            self._check(case, survivors)
            if isinstance(decision, policy.GiveUp):
                self._give_up(decision.why, case)
            elif isinstance(decision, policy.Rejoin):
                self._rejoin(case, survivors)
            elif isinstance(decision, policy.Restart):
                case.tries += 1
                self._replacements.launch(decision.count)
            else:
                case.waits += self._replacements.starting == 0
                began = self._table.clock()
                self._wait(decision.seconds, now, case)
                self._generation.note_seconds("wait", self._table.clock() - began)
        self._note(case)
        return case.revived

    def end_out_of_step(self, seen: policy.Observation, call: RunningCall, at: Progress, *, since: float) -> NoReturn:
        """Raise the error about ranks that are out of step. As after any user's error, workers that
        are alive stay, and the next call begins without the others."""
        case = _Case(seen, call, at, len(self._table.members()), since)
        self._generation.end()
        self._generation.take_seconds()  # of anything before
        failed = self._table.failed()
        case.failed_ranks = {info.rank or 0 for info in failed if info.in_group}
        self._table.dismiss(*(info.worker for info in failed))
        self._note(case, continues=False)
        raise out_of_step_error(seen.detail, at)

    def _let_leave(self, case: _Case) -> bool:
        """Dismiss the members that leave, when the others, or the driver, have the state. Return
        False if that failed: then they stay until the next change."""
        leaving, case.seen = case.seen.leaving, replace(case.seen, leaving=())
        if self._in_place:
            stay = set(self._table.members()) - set(leaving)
            if not (stay or any(self._generation.rescue_state(each, case.call.number) for each in leaving)):
                case.tries += 1
                return False
        case.left_ranks |= {self._table[worker].rank or 0 for worker in leaving}
        self._table.dismiss(*(leaving if self._in_place else ()))  # otherwise all are replaced
        return True

    def _rejoin(self, case: _Case, survivors: list[str]) -> None:
        """Try once to form a generation of the survivors and the replacements that are ready."""
        if not self._generation.hear_from([*survivors, *self._replacements.ready_workers]):
            return
        if (not survivors or self._lack_state(case, survivors)) and self._replacements.dismiss_torn():
            return  # and decide again, because none could give these a whole state
        joining = self._replacements.take(max(self._membership.target - len(survivors), 0))
        try:
            formed = self._form(case, survivors, joining)
        except BaseException:  # the user's error, or Ctrl-C: these workers are alive, and one may have the only state
            self._replacements.take_back(joining)
            raise
        if not formed:
            logger.warning("a new process group could not be formed: %s", self._generation.causes())
            self._undo_forming(case, survivors, joining)

    def _form(self, case: _Case, survivors: list[str], joining: list[str]) -> bool:
        """Form a generation of these workers. They begin with the survivors' state, or, if none
        holds it any more, with a snapshot. Return False if that failed."""
        workers, state, saved = [*survivors, *joining], None, None
        if self._lack_state(case, survivors):
            revived = self._revive(workers, case.call.number)
            if revived is None:
                return False
            case.revived = revived
            saved = revived if revived.load is not None else None
            if not self._in_place:  # they take it when they have joined and are set up
                state = revived.data or None
        return self._generation.form(workers, state=state, saved=saved)

    def _lack_state(self, case: _Case, survivors: list[str]) -> bool:
        """Whether no survivor has the state of the group. An undefined one does not, if there is a
        snapshot, and if the call does not replace the state. One whose change was cut short does
        not until that call ends: the script has its error then."""
        states, call = [self._table[each].progress for each in survivors], case.call
        replaceable = not call.replaces and self._table.snapshots.latest() is not None
        return all((call.changes and each.cut_short) or (replaceable and each.undefined) for each in states)

    def _undo_forming(self, case: _Case, survivors: list[str], joining: list[str]) -> None:
        """Take the replacements back after a failed try. If no worker has failed, the network
        between them may be broken: then dismiss them, but not one with the only state, and not at
        the first try of a planned change, which counts as a failure from now on."""
        case.tries += 1
        failed = {info.worker for info in self._table.failed()} & {*survivors, *joining}
        first = case.seen.kind == "paused"
        if first and failed.isdisjoint(survivors):  # otherwise it is the failure of a member
            case.seen = replace(case.seen, kind="broken", detail=self._generation.causes())
        reserve = joining if failed or first else self._only_holder(survivors, joining)
        self._replacements.take_back(reserve)
        self._table.dismiss(*(worker for worker in joining if worker not in reserve))

    def _only_holder(self, survivors: list[str], joining: list[str]) -> list[str]:
        """Find the one of those that join which has a newer state than the survivors and the
        snapshot: the member that it took this from has failed. Mostly, there is none."""
        progress = self._table.progress_of([*survivors, *joining])
        best = newest_state(progress, self._table.snapshots.latest() or Snapshot())
        return [best] if best in joining else []

    def _check(self, case: _Case, survivors: list[str]) -> None:
        """Raise an error if only the user's set-up is in the way, or after too many attempts."""
        replacements = self._replacements
        lost = bool(survivors) and self._lack_state(case, survivors)
        if lost and not case.call.replaces and self._table.snapshots.latest() is None:
            self._note(case, continues=False)
            raise cut_short_error([self._table[worker].rank or 0 for worker in survivors])
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
        """Whether a failed set-up ends the call if those that are starting fail, too."""
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
                case.seen = policy.Observation("broken", reason=failure.reason, detail=failure.cause)
            if info.in_group and info.rank is not None:
                case.failed_ranks.add(info.rank)
                case.failed_on.add(info.machine)
            self._table.dismiss(info.worker)
        if case.logged or case.seen.kind == "paused":
            return
        case.logged = True
        self._log.on_wait(f"a new process group after: {case.seen.reason}")
        seen, at = case.seen, case.furthest
        where = f" in epoch {at.epoch}, batch {at.batches}" if at.epoch else ""  # which functions count themselves
        if seen.reason == DATA_LOADER:
            logger.warning("data loader failure%s: %s. Restarting this loader", where, seen.detail)
        elif seen.reason in policy.PLANNED and not case.failed_ranks:
            logger.info("%s%s: %s", seen.reason, where, seen.detail)
        else:
            on = f" on node {', '.join(sorted(case.failed_on))}" if case.failed_on else ""
            ranks = ranked(sorted(case.failed_ranks)) if case.failed_ranks else "no rank"
            logger.warning("%s%s: %s of %d failed%s (%s)", seen.reason, where, ranks, case.world, on, seen.detail)

    def _survivors(self, case: _Case) -> list[str]:
        """Find the members that can continue: none if processes cannot rejoin; then their state is
        saved as a snapshot, unless it is in checkpoints only."""
        survivors = self._table.members()
        if survivors and not self._in_place:
            if self._generation.keeps_state:
                self._rescue_state(survivors, case.call)
            else:
                self._generation.newest_snapshot(wait=True)  # its workers must not end while they are saving it
            self._table.dismiss(*survivors)
            self._replace_all(len(survivors))
            survivors = []
        return survivors

    def _rescue_state(self, survivors: list[str], call: RunningCall) -> None:
        states = self._table.progress_of(survivors)
        progress = {worker: each for worker, each in states.items() if not (call.changes and each.cut_short)}
        while (best := newest_state(progress)) and not self._generation.rescue_state(best, call.number):
            del progress[best]  # it failed, too, so try the one that has the newest state of the others

    def _replace_all(self, workers: int) -> None:
        """Start new processes for all. Their places are free, before Ray shows it."""
        places = min(self._membership.target, max(workers, self._table.group.room().capacity))
        wanted = places - self._replacements.ready - self._replacements.starting
        if wanted > 0:
            self._replacements.launch(wanted)

    def _situation(self, case: _Case, survivors: list[str]) -> policy.Situation:
        target = self._membership.target
        least = self._membership.least
        short = len(survivors) + self._replacements.ready < least or not survivors
        self._replacements.tick()
        return policy.Situation(
            survivors=len(survivors),
            ready=self._replacements.ready,
            starting=self._replacements.starting,
            free=self._table.group.room().free if short and not self._may_end(survivors) else 0,
            target=target,
            min_workers=least,
            failures=self._log.failures_since(case.call.recoveries_before) + (case.seen.reason not in policy.PLANNED),
            max_failures=case.call.max_failures,
            attempts=case.waits,
            max_attempts=self._elastic.max_attempts,
            gathered=self._replacements.should_join(target - len(survivors)),
            hangs=case.seen.hangs,
        )

    def _revive(self, joining: list[str], call: int) -> Snapshot | None:
        """Choose the snapshot that these processes start from when no member is left: the newest
        one, or an empty one if they all take the initial state of the first of them. Return None if
        they could not load it."""
        snapshot = self._generation.newest_snapshot(wait=True) or Snapshot()
        best = newest_state(self._table.progress_of(joining), snapshot if snapshot.data or snapshot.load else None)
        if best and self._in_place:
            return Snapshot(progress=self._table[best].progress, call=call)
        if snapshot.data and self._in_place and not self._generation.load(joining, snapshot.data):
            return None
        return snapshot

    def _wait(self, seconds: float, now: policy.Situation, case: _Case) -> None:
        """Wait for machines, or for replacements that are starting, until their number changes."""
        deadline = self._table.clock() + seconds
        if now.starting == 0:
            missing = max(now.min_workers - now.survivors, 1)
            demand = self._table.group.room().demand(missing)
            wanted = counted(missing, "more worker, which needs", "more workers, which need")
            self._log.on_wait(f"{wanted} {demand}")
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
            demand = self._table.group.room().demand(now.starting)
            self._log.on_wait(f"{counted(now.starting, 'new worker')} to start")
            wanted = counted(now.starting, "new worker to start, which needs", "new workers to start, which need")
            logger.warning("waiting for %s %s", wanted, demand)
        while self._table.clock() < deadline:
            self._table.pump(LOOK_S)
            self._replacements.tick()
            if self._replacements.ready > now.ready or self._replacements.starting < now.starting:
                return
            if now.starting == 0 and self._table.group.room().free > now.free:
                return

    def _note(self, case: _Case, *, continues: bool = True) -> None:
        at, took = case.furthest, self._generation.take_seconds()
        measured = {name: round(took.get(name, 0.0), 4) for name in policy.PHASES}
        recovery = policy.Recovery(
            case.seen.reason,
            tuple(sorted(case.failed_ranks | case.left_ranks)),
            case.world,
            len(self._table.members()),
            case.revived is None,
            max(at.step - (at if case.revived is None else case.revived.progress).step, 0),
            round(self._table.clock() - case.since, 4),
            epoch=at.epoch,
            batch=at.batches,
            detail=case.seen.detail,
            time=time.time(),
            step=at.step,
            phases={name: seconds for name, seconds in measured.items() if seconds > 0},
        )
        self._log.record(recovery, revived=case.revived, continues=continues)

    def _give_up(self, why: str, case: _Case) -> NoReturn:
        self._note(case, continues=False)
        hangs = case.seen.hangs >= policy.MAX_HANGS
        raise failed_error(
            why, self._log.recoveries[case.call.recoveries_before :], HangError if hangs else TrainingFailedError
        )


@dataclass
class _Case:
    """What is known about one recovery while it runs."""

    seen: policy.Observation
    call: RunningCall
    furthest: Progress
    world: int
    since: float
    failed_ranks: set[int] = field(default_factory=set)
    failed_on: set[str] = field(default_factory=set)  # their machines
    left_ranks: set[int] = field(default_factory=set)
    waits: int = 0
    tries: int = 0
    logged: bool = False
    awaits: bool = False  # the log says that it waits for new workers
    revived: Snapshot | None = None
