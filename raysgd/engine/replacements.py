"""Start and set up replacement workers beside a running group, to join it quickly. Driver."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from raysgd.core.decisions.policy import count_to_launch, is_time_to_join
from raysgd.core.outcomes import Failed, Ok
from raysgd.engine.generation import Generation
from raysgd.engine.watchdog import WARN_PART, collect_unfinished, end_if_silent, warn_of_slow
from raysgd.engine.worker_info import Stage, WorkerInfo
from raysgd.engine.worker_table import WorkerTable
from raysgd.errors import counted

logger = logging.getLogger("raysgd")

LOOK_EVERY_S = 0.5
GATHER_S = 3.0
GATHER_ALL_S = 15.0  # longer, where every change of the members ends all processes
OVERDUE_S = 15.0


class Replacements:
    """Starts the workers that are not in the group yet, takes them from stage to stage until they
    can join, and owns the pauses between launches. Never touches a member of the group.

    It keeps `spares` more of them than the group lacks. A hot spare is a replacement that became
    ready before it was needed, and nothing else.

    Where a process can join only one process group (`in_place` is False), a replacement is ready
    when its process is up, and is set up after it has joined the group.
    """

    def __init__(self, table: WorkerTable, generation: Generation, *, spares: int = 0) -> None:
        self._table, self._generation, self._in_place = table, generation, generation.in_place
        self._spares, self._said_no_room = spares, False
        self._start_s, self._setup_s = generation.limits.start_s, generation.limits.setup_s
        self.failure: Failed | None = None  # the error of user code that ended the set-up of the newest one
        self.unfinished = ""  # what the newest one did not finish within the limit for its set-up
        self._warned: set[str] = set()  # of those whose set-up takes long
        self._ready_at = 0.0
        self._look_at = 0.0
        self._pause_s = LOOK_EVERY_S
        self._overdue_s = OVERDUE_S

    @property
    def ready(self) -> int:
        """How many can join the group now."""
        return len(self.ready_workers)

    @property
    def ready_workers(self) -> list[str]:
        return [info.worker for info in self._are(Stage.READY)]

    @property
    def starting(self) -> int:
        """How many are starting, without those for which a second one was started."""
        return len(self._are(Stage.STARTING, Stage.UP, Stage.WARMING))

    def _are(self, *stages: Stage) -> list[WorkerInfo]:
        """Those in these stages. One that has taken the group's state comes first, then the one
        that has been ready for longest."""
        infos = [info for info in self._table.new_workers() if info.stage in stages]
        infos.sort(key=lambda info: info.since)
        return sorted(infos, key=lambda info: info.progress.order, reverse=True)

    def _by_readiness(self) -> list[WorkerInfo]:
        """Those that are ready, then those that will be, without overdue ones."""
        return [*self._are(Stage.READY), *self._are(Stage.UP, Stage.WARMING), *self._are(Stage.STARTING)]

    def should_join(self, missing: int) -> bool:
        """Return whether those that are ready should join a group with `missing` free places."""
        return is_time_to_join(
            missing=missing,
            ready=self.ready,
            starting=self.starting,
            waited_s=self._table.clock() - self._ready_at,
            patience_s=GATHER_S if self._in_place else GATHER_ALL_S,
        )

    # -- starting -------------------------------------------------------------------------------------

    def look(self, missing: int) -> None:
        """Start missing workers and spares that fit into the cluster, with a pause between
        attempts, and follow up on those that are starting."""
        self.tick()
        now = self._table.clock()
        lacking = max(missing, 0) + self._spares - self.starting - self.ready
        if lacking < 0:  # one that was overdue has come up: the one that was started in its place holds resources
            self._dismiss(self._by_readiness()[lacking:])
        if lacking <= 0 or now < self._look_at:
            return
        self._look_at = now + self._pause_s
        count = count_to_launch(
            missing=missing,
            spares=self._spares,
            ready=self.ready,
            starting=self.starting,
            room=self._table.group.room().free,
        )
        if count > 0:
            self.launch(count)
        if count < lacking and self._spares and not self._said_no_room:
            self._said_no_room = True
            without = min(lacking - count, self._spares)
            logger.warning(
                "training runs without %d of %s until there is room for %s",
                without,
                counted(self._spares, "hot spare"),
                self._table.group.room().demand(without),
            )

    def look_at_once(self) -> None:
        """Forget earlier failures, and the pause after them: the user asks for workers now."""
        self._pause_s, self._look_at, self.unfinished = LOOK_EVERY_S, 0.0, ""

    def forget_failures(self) -> None:
        """Forget failed set-ups, because a new recovery begins, in which they do not count."""
        self.failure, self.unfinished = None, ""

    def launch(self, count: int) -> None:
        kinds = ("replacement worker or hot spare", "replacement workers or hot spares")
        logger.warning("starting %s", counted(count, *kinds) if self._spares else counted(count, "replacement worker"))
        self._table.launch(count)
        if not self._in_place:
            self._ready_at = self._table.clock()
        self.forget_failures()

    def tick(self) -> None:
        """Follow up on all that are starting."""
        for info in self._table.new_workers():
            if info.ended is not None:
                self._drop(info, "its process ended" if info.broken is None else info.broken.cause)
            elif info.stage is Stage.UP:
                self._follow_up(info)
            elif info.stage is Stage.WARMING:
                self._follow_set_up(info)
            elif info.stage is Stage.READY:
                end_if_silent(self._table, info.worker, "wait")
            elif self._table.clock() - info.since > self._start_s:
                self._drop(info, f"its process did not start within {self._start_s:.0f} s")
            elif info.stage is Stage.STARTING and self._is_overdue(info):
                self._table.set_stage(info.worker, Stage.OVERDUE)
                self._overdue_s = min(self._overdue_s * 2, self._start_s)  # the machine may just be slow

    def _is_overdue(self, info: WorkerInfo) -> bool:
        """Whether to start a second one, of which the first that is up is used: Ray can forget an
        actor that was starting on a node that failed."""
        return self._table.clock() - info.since > self._overdue_s and self._table.group.room().free > 0

    def _follow_up(self, info: WorkerInfo) -> None:
        if self._table.park_if_excluded(info.worker):
            return
        if self._in_place:
            self._table.set_stage(info.worker, Stage.WARMING)
            call = self._table.group.submit(info.worker, "warm", self._generation.warm_up_arguments())
            self._table.expect(info.worker, call)
        else:
            self._set_ready(info.worker)

    def _follow_set_up(self, info: WorkerInfo) -> None:
        outcome = self._table.reply(info.last_call)
        if isinstance(outcome, Ok):
            self._set_ready(info.worker)
        elif outcome is not None:
            story = outcome.traceback if isinstance(outcome, Failed) else str(outcome)
            self.failure = outcome if isinstance(outcome, Failed) else None
            self._drop(info, f"its set-up failed: {story}")
        elif self._table.clock() - info.moved_at > self._setup_s:
            stories = collect_unfinished(self._table, [info.worker], "warm", self._setup_s)
            story = stories.get(info.worker, "")
            self.unfinished = info.unfinished
            self._drop(info, story or f"its set-up took longer than {self._setup_s:g} s")
        else:
            end_if_silent(self._table, info.worker, "warm")
            if self._table.clock() - info.moved_at > self._setup_s * WARN_PART and info.worker not in self._warned:
                self._warned.add(info.worker)
                warn_of_slow(self._table, [info.worker], "warm", self._setup_s)

    def _set_ready(self, worker: str) -> None:
        self._table.set_stage(worker, Stage.READY)
        self._ready_at = self._table.clock()
        self._pause_s, self._overdue_s = LOOK_EVERY_S, OVERDUE_S

    # -- joining the group ----------------------------------------------------------------------------

    def take(self, most: int) -> list[str]:
        """Take at most `most` ready workers, for which the group has places. If these are enough,
        keep others as spares, and dismiss the rest."""
        ready = self._are(Stage.READY)
        if len(ready) >= most:
            self._dismiss(self._by_readiness()[most + self._spares :])
            self._dismiss(self._are(Stage.OVERDUE))
        workers = [info.worker for info in ready[:most]]
        for worker in workers:
            self._table.set_stage(worker, Stage.JOINING)
        return workers

    def dismiss_torn(self) -> bool:
        """Dismiss those that are ready and have only a part of a state. Return whether there were
        any."""
        torn = [info for info in self._are(Stage.READY) if info.progress.undefined]
        self._dismiss(torn)
        return bool(torn)

    def take_back(self, workers: Iterable[str]) -> None:
        """Take back workers whose generation was not formed. Some can join another one."""
        for worker in workers:
            info = self._table.get(worker)
            if info is not None and info.ended is None and self._in_place:
                self._set_ready(worker)
            else:
                self._table.dismiss(worker)

    def keep(self, missing: int) -> None:
        """Dismiss those that are starting, and those that are ready and not needed."""
        reserve = self._are(Stage.READY)[: max(missing, 0) + self._spares]
        self._dismiss(info for info in self._table.new_workers() if info not in reserve)

    def dismiss_preempted(self, draining: Collection[str]) -> None:
        """Dismiss those on machines that will be stopped."""
        for info in self._table.new_workers():
            if info.notice or info.node in draining:
                logger.info("a replacement worker is started again, because its machine will be stopped")
                self._table.dismiss(info.worker)

    def dismiss_all(self) -> None:
        self._dismiss(self._table.new_workers())

    def _dismiss(self, infos: Iterable[WorkerInfo]) -> None:
        self._table.dismiss(*(info.worker for info in infos))

    def _drop(self, info: WorkerInfo, why: str) -> None:
        was = "was lost while it waited" if info.stage is Stage.READY else "did not start"
        self._table.dismiss(info.worker)
        if self._table.clock() >= self._look_at:  # several that fail together (with their node, perhaps) count once
            self._pause_s = min(self._pause_s * 2, 30.0)
            self._look_at = self._table.clock() + self._pause_s
        logger.warning("a replacement worker %s (%s); trying again in %.1f s", was, why, self._pause_s)
