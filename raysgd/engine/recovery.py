"""From a broken generation to one that stands, or to an error that tells the story."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NoReturn

from raysgd.config import ElasticConfig, Limits
from raysgd.elastic import GiveUp, Observation, Rejoin, Restart, Situation, backoff, decide
from raysgd.engine.failure import raise_user_error, story_of, unfinished_story
from raysgd.engine.membership import Membership
from raysgd.engine.recovery_log import PLANNED, RecoveryLog
from raysgd.engine.replacements import Replacements
from raysgd.engine.standing import Standing
from raysgd.engine.worker_table import WorkerInfo, WorkerTable
from raysgd.errors import WorkerStartError
from raysgd.outcomes import DATA_LOADER
from raysgd.progress import Progress, most_advanced
from raysgd.snapshot import Snapshot
from raysgd.workers.blob import Blob

__all__ = ["RecoveryLoop"]

logger = logging.getLogger("raysgd")

LOOK_S = 0.25


class RecoveryLoop:
    """Carries out what `elastic.decide` decides. Every pass starts from who is there now, so that further deaths,
    also in the middle of a recovery, only mean another pass."""

    def __init__(
        self,
        table: WorkerTable,
        standing: Standing,
        replacements: Replacements,
        membership: Membership,
        log: RecoveryLog,
        *,
        elastic: ElasticConfig,
        limits: Limits,
        in_place: bool,
        jitter: Callable[[], float],
    ) -> None:
        self._table, self._standing, self._replacements = table, standing, replacements
        self._membership, self._log = membership, log
        self._elastic, self._limits, self._in_place, self._jitter = elastic, limits, in_place, jitter

    def recover(
        self, seen: Observation, *, since: float, max_losses: int, mark: int, world: int | None = None
    ) -> Snapshot | None:
        """Returns the snapshot that training goes on from, or None when survivors carry on in place."""
        seated = [self._table.members[worker] for worker in self._table.seated()]
        furthest = max((member.progress for member in seated), key=lambda p: p.order, default=Progress())
        if seen.culprit is not None:
            culprit = self._table.members[seen.culprit]
            seen = replace(seen, detail=f"rank {culprit.rank} on node {culprit.node[:8]}: {seen.detail}")
        case = _Case(seen, furthest, len(seated) if world is None else world, since, mark)
        self._standing.up = False
        self._replacements.failure, self._replacements.stuck = None, ""
        while not self._standing.up:
            self._bury(case)
            survivors = self._survivors()
            now = self._situation(case, survivors, max_losses)
            pause = backoff(case.attempts, self._elastic.backoff_s, self._elastic.backoff_max_s, self._jitter())
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
                case.attempts += self._replacements.starting == 0
                self._wait(decision.seconds, now)
        self._note(case, after=len(self._table.seated()))
        return case.revived

    def _rejoin(self, case: _Case, survivors: list[str]) -> None:
        """One try. Newcomers that met nobody although nobody died are not tried twice: their network may be at fault."""
        newcomers = self._replacements.take(max(self._table.target - len(survivors), 0))
        stood = False
        try:
            if not survivors:
                case.revived = self._revive(newcomers)
            state = Blob(case.revived.data) if case.revived and not self._in_place else None
            stood = self._standing.form([*survivors, *newcomers], state=state or None)
        finally:
            if not stood:
                case.tries += 1
                unharmed = not self._table.fallen()
                self._replacements.take_back([] if unharmed else newcomers)
                for worker in newcomers if unharmed else []:
                    self._table.dismiss(worker)

    def _check(self, case: _Case, survivors: list[str]) -> None:
        """A recovery has its own bound; and when only the user's set-up stands in the way, its error is the answer."""
        failure, alone = self._replacements.failure, not survivors and not self._replacements.ready
        if failure is not None and alone and self._replacements.starting == 0:
            raise_user_error(failure, WorkerInfo("a fresh worker"))
        if self._replacements.stuck and alone and self._replacements.starting == 0:
            raise WorkerStartError(unfinished_story([self._replacements.stuck]))
        if case.tries > self._elastic.max_attempts:
            self._give_up(f"{case.tries} tries to form a group again failed, one after the other", case)

    def _bury(self, case: _Case) -> None:
        """Takes the dead off the list, and says so once."""
        for member in self._table.fallen():
            if member.seated and member.rank is not None:
                case.lost.add(member.rank)
            self._table.dismiss(member.worker)
        if not case.said and case.seen.reason == DATA_LOADER:
            logger.warning(
                "data loader failure in epoch %d, batch %d: %s. Restarting this loader and going on after the last "
                "committed batch",
                case.furthest.epoch,
                case.furthest.batches,
                case.seen.detail,
            )
        elif not case.said:
            logger.warning(
                "%s in epoch %d, batch %d: lost rank(s) %s of %d (%s)",
                case.seen.reason,
                case.furthest.epoch,
                case.furthest.batches,
                sorted(case.lost) or "none",
                case.world,
                case.seen.detail,
            )
        case.said = True

    def _survivors(self) -> list[str]:
        """Members that can go on in place; a backend that cannot rejoin leaves only their state."""
        survivors = self._table.seated()
        if survivors and not self._in_place:
            progress = {worker: self._table.members[worker].progress for worker in survivors}
            while progress and not self._membership.rescue(best := most_advanced(progress)):
                del progress[best]  # it failed too: the state of the next one is the most advanced that is left
            for worker in survivors:
                self._table.dismiss(worker)
            self._replace(len(survivors))
            survivors = []
        return survivors

    def _replace(self, left: int) -> None:
        """Fresh processes for all, now: the places of those that were dismissed are free, whatever Ray says yet."""
        places = min(self._table.target, max(left, self._table.group.holds_at_most()))
        wanted = places - len(self._replacements.ready) - self._replacements.starting
        if wanted > 0:
            self._replacements.launch(wanted)

    def _situation(self, case: _Case, survivors: list[str], max_losses: int) -> Situation:
        least = min(self._elastic.min_workers, self._table.target)
        short = len(survivors) + len(self._replacements.ready) < least or not survivors
        self._replacements.tick()
        return Situation(
            survivors=len(survivors),
            ready=len(self._replacements.ready),
            starting=self._replacements.starting,
            free=self._table.group.room() if short else 0,
            target=self._table.target,
            min_workers=least,
            in_place=self._in_place,
            losses=self._log.losses_since(case.mark) + (case.seen.reason not in PLANNED),
            max_losses=max_losses,
            attempts=case.attempts,
            max_attempts=self._elastic.max_attempts,
            gathered=self._replacements.gathered(),
        )

    def _revive(self, newcomers: list[str]) -> Snapshot:
        """Nobody is left: fresh processes take the newest snapshot, or the first one's own beginning."""
        snapshot = self._table.snapshots.latest() or Snapshot()
        holders = {w: m.progress for w in newcomers if (m := self._table.members[w]).holds_state}
        if holders and holders[most_advanced(holders)].order >= snapshot.progress.order:
            return Snapshot(progress=holders[most_advanced(holders)], call=self._table.current_call)
        if not snapshot.data:
            self._table.members[newcomers[0]].holds_state = self._in_place
            return snapshot
        if not self._in_place:
            return snapshot  # they take it when they have met, and are set up
        self._standing.former.give(newcomers, Blob(snapshot.data))
        return snapshot

    def _wait(self, seconds: float, now: Situation) -> None:
        """Waits for machines, or for recruits that are on their way; ends early when either comes."""
        deadline = self._table.clock() + seconds
        if now.starting == 0:
            logger.warning(
                "not enough workers to go on (%d stand, %d needed): waiting %.1f s for %s, attempt %d of %d",
                now.survivors,
                now.min_workers,
                seconds,
                self._table.group.wanting(max(now.min_workers - now.survivors, 1)),
                now.attempts + 1,
                now.max_attempts,
            )
        elif now.survivors == 0:
            wanting = self._table.group.wanting(now.starting)
            logger.warning("waiting for %d fresh worker(s) to come up; they need %s", now.starting, wanting)
        while self._table.clock() < deadline:
            self._table.pump(LOOK_S)
            self._replacements.tick()
            if len(self._replacements.ready) > now.ready or self._replacements.starting < now.starting:
                return
            if now.starting == 0 and self._table.group.room() > now.free:
                return

    def _note(self, case: _Case, *, after: int) -> None:
        base = case.revived.progress.step if case.revived is not None else case.furthest.step
        self._log.note(
            case.seen.reason,
            lost=tuple(sorted(case.lost)),
            before=case.world,
            after=after,
            in_place=case.revived is None,
            since=case.since,
            at=case.furthest,
            redone=max(case.furthest.step - base, 0),
            detail=case.seen.detail,
        )

    def _give_up(self, why: str, case: _Case) -> NoReturn:
        self._note(case, after=0)
        raise story_of(why, self._log.recoveries[case.mark :])


@dataclass
class _Case:
    """What is known of one recovery while it goes on."""

    seen: Observation
    furthest: Progress
    world: int
    since: float
    mark: int
    lost: set[int] = field(default_factory=set)
    attempts: int = 0
    tries: int = 0
    said: bool = False
    revived: Snapshot | None = None
