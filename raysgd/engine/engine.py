"""The workers of a trainer, from their start to their end, and what runs calls on them. Driver."""

from __future__ import annotations

import logging
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, TypeVar

from raysgd.config import ElasticConfig, Limits
from raysgd.core.decisions.policy import Observation, Recovery
from raysgd.core.measures.progress import Progress
from raysgd.core.protocols import ProcessGroupBackend
from raysgd.core.snapshot import Snapshot
from raysgd.engine import failure
from raysgd.engine.call import (
    CTRL_C_S,
)
from raysgd.engine.call_lock import CallLock, Claim
from raysgd.engine.call_loop import CallLoop
from raysgd.engine.generation import Generation
from raysgd.engine.membership import Membership
from raysgd.engine.recovery import RecoveryLog, RecoveryLoop
from raysgd.engine.replacements import Replacements
from raysgd.engine.watchdog import ask
from raysgd.engine.worker_info import WorkerInfo
from raysgd.engine.worker_table import During, OnReport, WorkerTable
from raysgd.errors import ClusterError, NotActiveError, counted
from raysgd.workers.worker_group import WorkerGroupProtocol

logger = logging.getLogger("raysgd")

T = TypeVar("T")

CLOSE_S = 10.0
# How long a shutdown waits for a call in another thread, which it cancels. That call waits CTRL_C_S for its workers.
RELEASE_S, RELEASE_LOOK_S = CTRL_C_S + CLOSE_S, 0.05


class Engine:
    """Owns the group of workers and the objects that keep it running. Only one thread at a time may
    call it; a second one gets an error. `living` are the engines of this process, because only this
    process can end the workers of an earlier one that hold the resources of the next. `factory` and
    `hook` are packed for the workers. Where the state is in checkpoints only, `saved` returns what
    new workers can load the newest one from; if its argument is True, it first waits for a save
    that is running, and otherwise it may return what is still being saved. `during` returns a
    context that the engine enters for each `Phase` of its work, for those who watch it."""

    living: ClassVar[weakref.WeakSet[Engine]] = weakref.WeakSet()

    def __init__(
        self,
        group: WorkerGroupProtocol,
        backend: ProcessGroupBackend,
        factory: Any,
        *,
        hook: Any = None,
        notice: Callable[..., Any] | None = None,
        target: int,
        least: int | None = None,
        elastic: ElasticConfig,
        limits: Limits,
        saved: Callable[[bool], Snapshot | None] | None = None,
        on_progress: Callable[[WorkerInfo], None] = lambda info: None,
        on_recovery: Callable[[Recovery], None] = lambda recovery: None,
        on_wait: Callable[[str], None] = lambda what: None,
        on_report: OnReport = lambda message, body, acknowledge: acknowledge(),
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
        during: During = nullcontext,
    ) -> None:
        self.group, self.limits, self._backend = group, limits, backend
        self._least = target if least is None else least
        self._table = table = WorkerTable(
            group, silent_s=limits.silent_s, clock=clock, on_progress=on_progress, on_report=on_report, during=during
        )
        self._log = RecoveryLog(self._cancellable(on_recovery), self._cancellable(on_wait))
        self._generation = generation = Generation(table, backend, limits, factory=factory, hook=hook, saved=saved)
        self._replacements = replacements = Replacements(table, generation, spares=elastic.hot_spares)
        self._membership = membership = Membership(
            table, generation, replacements, target=target, elastic=elastic, notice=notice
        )
        recovery = RecoveryLoop(table, generation, replacements, membership, self._log, elastic=elastic, jitter=jitter)
        self._ended, self._call_lock = False, CallLock()
        self.calls = CallLoop(table, generation, membership, recovery, self._log, self._call_lock, elastic)
        self._shutdown: Callable[[], Callable[..., None] | None] = lambda: None

    # -- life -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Launch the first workers. An error in the user's set-up is raised unchanged."""
        try:
            failure.check_can_fit(self.group, self._least)
            self._check_not_held()
            self.living.add(self)
            self._generation.start(self._membership.target, self._least)
            self._membership.start_replacements()
        except BaseException:
            self.stop(force=True)
            raise

    def attach(
        self, *, trained: int | None, reached: Progress | None = None, recoveries: Sequence[Recovery] = ()
    ) -> bool:
        """Take over the workers of an earlier driver of this trainer, which had this number
        `trained` and these recoveries, and had `reached` this. Return False if none has that state
        or a later one, or if it had committed nothing (None): then all are ended, and `start`
        follows. If a call was training, the next one that trains continues it."""
        self.living.add(self)
        return self.calls.take_over(trained, reached, recoveries)

    def _check_not_held(self) -> None:
        """Raise an error at once if idle engines of this process hold what the first workers need.
        Their hot spares are given up for it."""
        idle = [each for each in self.living if each.calls.active and each._call_lock.held(here=False) is None]
        others = {each: each.world_size for each in idle if each.group.elastic and each.world_size}
        if not others or not self.group.elastic:
            return
        room = self.group.room()
        if room.free < self._least:
            for engine in others:
                engine.give_up_spares()
            room = self.group.room()
        if room.free < self._least <= min(room.capacity, room.free + sum(others.values())):
            sizes = {engine: counted(size, "worker") for engine, size in others.items()}
            raise failure.held_error(room, self._least, sizes)

    def belong_to(self, shutdown: Callable[..., None]) -> None:
        """Let `end_trainer` call this method of a trainer, as long as that lives, and not
        `stop`."""
        self._shutdown = weakref.WeakMethod(shutdown)

    def end_trainer(self, *, force: bool = False) -> None:
        """End the trainer that the workers belong to."""
        (self._shutdown() or self.stop)(force=force)

    def stop(self, *, force: bool = False) -> None:
        """End every worker. If Ctrl-C interrupted an earlier call of `stop`, finish what it began.
        A call that is running in another thread ends with an error."""
        if self._ended:
            return
        unfinished = self._end_call_elsewhere()
        if self.calls.active:
            self.calls.end()
        else:
            force = True
        try:
            if not force and self._generation.up:
                ask(self._table, self._table.members(), "close", {}, limit_s=CLOSE_S)
        except (ClusterError, NotActiveError) as error:
            logger.warning("ending the workers without closing their replicas first: %s", error)
        finally:
            try:
                self._end_group()
            except KeyboardInterrupt:  # a worker that stayed would keep its resources
                self._end_group()
                raise

        if (claim := self._call_lock.held(here=True)) is not None:
            unfinished = NotActiveError(
                f"a callback or a signal handler shut the trainer down while {claim.describe()}"
            )
        if unfinished is not None:  # that call ends with this error when its user code returns
            self.cancel(unfinished)

    def _cancellable(self, callback: Callable[[T], None]) -> Callable[[T], None]:
        """Wrap the callback for calls in which nothing waits after it: if it cancels the running
        call (by a shutdown, for example), that call ends now, because it would miss its workers."""

        def call(argument: T) -> None:
            callback(argument)
            self._table.raise_cancelled()

        return call

    def _end_group(self) -> None:
        try:
            try:
                self._backend.plan([])
            finally:
                self.group.stop()
        except Exception:
            self._ended = True
            raise
        self._ended = True

    def _end_call_elsewhere(self) -> NotActiveError | None:
        """End a call of another thread. Return its error if user code here still holds it up."""
        claim = self._call_lock.held(here=False)
        if claim is None:
            return None
        thread = threading.current_thread().name
        error = NotActiveError(f"the trainer was shut down in thread {thread!r} while {claim.describe()}")
        self.cancel(error)
        deadline = time.monotonic() + RELEASE_S
        while self._call_lock.held(here=False) is not None and time.monotonic() < deadline:
            time.sleep(RELEASE_LOOK_S)
        self.cancel(None)
        return None if self._call_lock.held(here=False) is None else error

    def claim(self, call: str) -> Claim:
        """A context in which only this thread calls the engine, for several jobs."""
        return self._call_lock.claim(call)

    # -- state ----------------------------------------------------------------------------------------

    @property
    def world_size(self) -> int:
        return len(self._table.members())

    @property
    def target(self) -> int:
        """How many workers there should be."""
        return self._membership.target

    @property
    def nodes(self) -> list[str]:
        """The node of each rank."""
        return [self._table[worker].node for worker in self._table.members()]

    def processes(self) -> list[tuple[str, int]]:
        """The machine and the process id of each rank. Any thread may call this."""
        infos = map(self._table.get, self._table.members())  # None: it was dismissed meanwhile
        return [(info.machine, info.pid) if info is not None else ("", 0) for info in infos]

    @property
    def generation(self) -> int:
        return self._generation.number

    @property
    def recoveries(self) -> list[Recovery]:
        """All changes of the workers so far, in a new list."""
        return list(self._log.recoveries)

    # -- members --------------------------------------------------------------------------------------

    def give_up_spares(self) -> None:
        """End the hot spares of an idle trainer. Its next call starts them if there is room."""
        with self.claim("the start of another trainer"), self.group.releasing():
            self._replacements.dismiss_all()

    def resize(self, count: int) -> None:
        """Set the number of workers. Surplus workers leave. If some are missing, wait for them. If
        a failure ends an attempt, those that were to leave are members of the generation that
        continues, until the next attempt."""
        with self.claim("resize()"):
            call, before = self.calls.ready_call(max_failures=-1), self.target
            try:
                self._membership.resize(count)
                with self.group.releasing():
                    while self._membership.has_change():
                        self.calls.restore(Observation("paused"), call)
            except BaseException:
                self._membership.give_up_change(before)
                raise

    def cancel(self, error: BaseException | None) -> None:
        """Stop the running call, which raises `error`; None withdraws that. For any thread."""
        self._table.cancel(error)


def shutdown_all() -> None:
    """End all trainers of this process, also those without a variable. Raise the first error of one
    when all have ended."""
    failed: list[Exception] = []
    for engine in list(Engine.living):
        try:
            engine.end_trainer()
        except Exception as error:
            failed.append(error)
    if failed:
        raise failed[0]
