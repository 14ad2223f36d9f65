"""Keep a group of workers running, in the only loop that handles failures. Driver.

run(job):
    make sure that the process group is up
    repeat:
        fan the call out to all ranks           (call.py)
        classify the outcomes                   (policy.py, pure)
        done       -> compare the ranks' weights, and return what they measured, one part for each generation
        user error -> raise it unchanged; the next call forms the group again
        paused     -> plan the change that is due: the replacements join, and the workers that are to leave do
        broken     -> recover: decide (policy.py, pure) to rejoin, restart, wait or give up
"""

from __future__ import annotations

import logging
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar, NoReturn, TypeVar

from raysgd.config import ElasticConfig, Limits
from raysgd.core.decisions.policy import Observation, Recovery, classify
from raysgd.core.measures.progress import Progress
from raysgd.core.outcomes import Failed, Interrupted, Ok, Outcome
from raysgd.core.protocols import Call, ProcessGroupBackend
from raysgd.core.snapshot import Snapshot
from raysgd.engine import failure
from raysgd.engine.call import (
    CTRL_C_S,
    FanOut,
    Job,
    PartialResults,
    RunningCall,
    collect_results_since,
)
from raysgd.engine.call_lock import CallLock, Claim
from raysgd.engine.generation import Generation
from raysgd.engine.membership import Membership
from raysgd.engine.rank_comparison import Comparison
from raysgd.engine.recovery import RecoveryLog, RecoveryLoop
from raysgd.engine.replacements import Replacements
from raysgd.engine.takeover import take_over
from raysgd.engine.watchdog import ask
from raysgd.engine.worker_info import WorkerInfo
from raysgd.engine.worker_table import During, OnReport, Phase, WorkerTable
from raysgd.errors import CheckpointError, ClusterError, DivergenceError, NotActiveError, counted
from raysgd.workers.worker_group import WorkerGroupProtocol

logger = logging.getLogger("raysgd")

T = TypeVar("T")

CLOSE_S = 10.0
# How long a shutdown waits for a call in another thread, which it cancels. That call waits CTRL_C_S for its workers.
RELEASE_S, RELEASE_LOOK_S = CTRL_C_S + CLOSE_S, 0.05
FORM_AT_MOST = 3


class Engine:
    """Owns the group of workers and the objects that keep it running, and the number of the newest
    call. Only one thread at a time may call it; a second one gets an error. `living` are the
    engines of this process, because only this process can end the workers of an earlier one that
    hold the resources of the next. `factory` and `hook` are packed for the workers. Where the state
    is in checkpoints only, `saved` returns what new workers can load the newest one from; if its
    argument is True, it first waits for a save that is running, and otherwise it may return what is
    still being saved. `during` returns a context that the engine enters for each `Phase` of its
    work, for those who watch it."""

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
        self._recovery = RecoveryLoop(
            table, generation, replacements, membership, self._log, elastic=elastic, jitter=jitter
        )
        self._comparison = Comparison(elastic)
        self._keeps_snapshots = elastic.snapshot_every is not None
        self.active, self._ended, self._reached = True, False, Progress()
        self._shutdown: Callable[[], Callable[..., None] | None] = lambda: None
        self._call_lock = CallLock()
        self._calls = 0
        self.trained = 0  # the number of the newest call that trains and has ended
        self.changes = 0  # the number of the newest change of the state by a call that does not train
        # The call that trains in which an earlier driver has ended (None: it has no number here), and what was measured
        # in it.
        self._interrupted: tuple[int | None, list[PartialResults]] | None = None
        self.measured: Sequence[PartialResults] = ()  # in the parts of the running call that have ended
        self._running: RunningCall | None = None
        # Calls that ended after the newest snapshot, and how.
        self._finished: dict[int, tuple[Job, Progress]] = {}
        self._outage_raised = False  # whether the error about the current outage of Ray was raised
        self._load_failed = False  # after it had begun to change the state, and none has succeeded since

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
        objects, record = (self._table, self._generation, self._recovery, self._log), (trained, reached, recoveries)
        call = take_over(*objects, *record, keeps_snapshots=self._keeps_snapshots)
        if call is None or trained is None:
            return False
        self._calls, self.trained, self.changes = max(call[0], trained), trained, self.progress.loads
        self._interrupted = call if call[0] > trained else None
        return True

    def continue_call(self, measured: PartialResults) -> None:
        """Let the next call that trains continue the one in which the loaded state was saved, with
        what that had measured."""
        self._interrupted = None, [measured]

    def _check_not_held(self) -> None:
        """Raise an error at once if idle engines of this process hold what the first workers need.
        Their hot spares are given up for it."""
        idle = [each for each in self.living if each.active and each._call_lock.held(here=False) is None]
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
        if self.active:
            self._reached, self.active = self.progress, False
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
    def progress(self) -> Progress:
        """The progress of the most advanced rank, as far as the driver knows."""
        if not self.active:
            return self._reached
        reported = self._table.progress_of(self._table.members()).values()
        return max(reported, key=lambda each: each.order, default=Progress())

    @property
    def reached(self) -> Progress:
        """How far training has come, also if all workers have failed since, and work of calls that
        have returned must be done again."""
        ends = (end for _, end in self._finished.values() if end.step < sys.maxsize)
        return max((self.progress, *ends), key=lambda each: each.place)

    @property
    def recoveries(self) -> list[Recovery]:
        """All changes of the workers so far, in a new list."""
        return list(self._log.recoveries)

    @property
    def undefined(self) -> bool:
        """Whether a load has failed while it changed the state, and none has succeeded since. New
        workers, with the state of an older snapshot, change nothing about that."""
        return self._load_failed or self.progress.undefined

    def forget_snapshot(self) -> None:
        """Drop the snapshot, because nothing in it is valid any more."""
        self._table.snapshots.forget()

    def keep_load(self, snapshot: Snapshot) -> None:
        """Keep what new processes load if all workers fail before a snapshot of the state that was
        loaded has arrived."""
        if self._keeps_snapshots and self.group.elastic and self._table.snapshots.latest() is None:
            self._table.snapshots.offer(snapshot)

    @contextmanager
    def state_replaced_by_hand(self, loads: int) -> Iterator[None]:
        """A context in which the workers load another state. If all fail meanwhile, they continue
        from the newest snapshot, and no earlier call is finished first."""
        snapshot, finished = self._table.snapshots.latest(), self._finished
        self._finished = {}
        try:
            yield
        except BaseException:
            self._finished, self._load_failed = finished, self.undefined
            self._table.snapshots.take_back(snapshot, loads)
            raise
        self._load_failed = False
        self._table.snapshots.require(loads)

    # -- members --------------------------------------------------------------------------------------

    def give_up_spares(self) -> None:
        """End the hot spares of an idle trainer. Its next call starts them if there is room."""
        with self.claim("the start of another trainer"), self.group.releasing():
            self._replacements.dismiss_all()

    def resize(self, count: int) -> None:
        """Set the number of workers. Surplus workers leave. If some are missing, wait for them."""
        with self.claim("resize()"):
            call = self._ready_call(max_failures=-1)
            self._change_members(call, lambda: self._membership.resize(count))

    def _change_members(self, call: RunningCall, ask: Callable[[], None]) -> None:
        """Make the change that the user asks for with `ask`. If a failure ends an attempt, those
        that were to leave are members of the generation that continues, until the next attempt."""
        before = self.target
        try:
            ask()
            with self.group.releasing():
                while self._membership.has_change():
                    self._restore(Observation("paused"), call)
        except BaseException:
            self._membership.give_up_change(before)
            raise

    # -- calls ----------------------------------------------------------------------------------------

    def cancel(self, error: BaseException | None) -> None:
        """Stop the running call, which raises `error`; None withdraws that. For any thread."""
        self._table.cancel(error)

    def run(self, job: Job) -> list[PartialResults]:
        """Run a job to its end, whatever fails. Return the results of its parts, in order."""
        with self.claim(f"the call {job.call.name!r}"):
            self._calls += 1
            running = self._ready_call(max_failures=job.max_failures, replaces=job.replaces)
            parts: list[PartialResults] = []
            if job.again == "resume":
                if self._interrupted is not None:
                    (number, parts), self._interrupted = self._interrupted, None
                    running = running if number is None else replace(running, number=number)
                if self._is_change_due():
                    self._restore(Observation("paused"), running)
                self._wait_for_least(running)
            outer, self._running = self._running, running
            try:
                parts = self._run(job, running, parts)
            except BaseException:
                self._note_end(job, running)
                raise
            finally:
                self._running = outer
                self.trained = running.number if job.again == "resume" else self.trained
            if job.redo and self.group.elastic:
                self._finished[running.number] = job, self.progress
            return parts

    def _note_end(self, job: Job, running: RunningCall) -> None:
        """Note how far a call has trained that an error has ended: it is to be run again up to
        there."""
        end = self.progress
        if job.redo and job.again == "resume" and self.group.elastic and end.call == running.number and end.batches:
            call = replace(job.call, arguments={**job.call.arguments, "most": end.batches})
            self._finished[running.number] = replace(job, call=call), end

    def change(self, call: Call) -> list[PartialResults]:
        """Make a call that changes the state for the user. The state has that change once,
        whichever worker fails: ranks that have it do not make it again, and new ones whose snapshot
        lacks it do. Return the survivors' answers."""
        self.changes += 1
        self._comparison.note_change()
        return self.run(Job(replace(call, change=self.changes), again="keep", redo=True))

    def _run(self, job: Job, running: RunningCall, past: Sequence[PartialResults] = ()) -> list[PartialResults]:
        """Run a job, run one that had ended again, under its number, or continue one of which these
        are the `past` parts."""
        self._run_again(running)
        parts = [part.until(self.progress.step) for part in past]
        began, began_at = self.progress, self._table.clock()
        hung: list[Any] = []  # where code hung, as often as it hung there in a row
        while True:
            self.measured = parts
            call = self._prepare_call(job, running)
            fan_out = FanOut(self._table, self._generation, job, self._wants_boundary)
            fan_out.run(call)
            outcomes = fan_out.outcomes
            seen = self._count_hangs(classify(outcomes), hung)
            if seen.kind == "user_error":
                self._raise_user_error(seen, outcomes)
            if seen.kind == "out_of_step":
                self._recovery.end_out_of_step(seen, running, self.progress, since=fan_out.troubled_at)
            part = PartialResults(tuple(outcomes.values()), self._generation.number)
            parts = [*parts, part] if job.again == "resume" else [part]
            if seen.kind == "done":
                if job.compare is not None:
                    self._compare_ranks(job.compare, self._table.clock() - began_at)
                return parts
            begun = replace(running, changes=job.call.change > 0)
            revived = self._restore(seen, begun, since=fan_out.troubled_at)
            # Whether training continues from a state from before this call. A new worker can have taken such a one.
            goes_back = revived is not None and (revived.call != running.number or revived.progress.place < began.place)
            if goes_back:
                self._run_again(running)
                if job.needs_state and self.progress.order < began.order:
                    raise failure.older_state_error(job.call.name, began, self.progress)
            if job.again == "keep" and not goes_back and (answers := _collect_answers(outcomes)):
                return [answers]
            parts = self._drop_repeated_work(parts, revived, running)

    def _run_again(self, running: RunningCall) -> None:
        """Finish the calls before this one, if all workers have failed and continue from a snapshot
        in one of them: the snapshot of its end had not arrived. Otherwise this call would train the
        rest of that epoch, and the run one epoch less."""
        newest = self._generation.newest_snapshot()
        for number, (_, end) in list(self._finished.items()):
            if newest is not None and end.place <= newest.progress.place:
                del self._finished[number]
        here = self.progress.place
        lost = [n for n, (_, end) in self._finished.items() if n < running.number and end.place > here]
        calls = {number: each for number, each in self._finished.items() if lost and number >= lost[0]}
        for number in calls:
            del self._finished[number]  # until it has ended again
        try:
            for number, (job, end) in list(calls.items()):
                if number < running.number:
                    calls[number] = job, replace(end, step=sys.maxsize)  # an error may end it again
                    self._wait_for_least(running)
                    self._run(job, replace(running, number=number))
                    end = self.progress  # another number of workers makes another number of steps
                self._finished[number] = job, end
                del calls[number]
        finally:
            self._finished |= calls

    def _wait_for_least(self, running: RunningCall) -> None:
        """Wait for workers before training, if there are too few, because an error has ended a call
        that waited for them. Calls that do not train, as `save`, need no more."""
        least = self._membership.least
        if self.world_size < least:
            detail = f"{counted(self.world_size, 'worker is', 'workers are')} left, and training needs {least}"
            self._restore(Observation("broken", reason="restart", detail=detail), running)

    def _count_hangs(self, seen: Observation, hung: list[Any]) -> Observation:
        """Count in `hung` how many times in a row code has hung at the same place of the call: in
        the same batch, or, as training functions count none, after the same commits."""
        if seen.hung_at is None:
            return seen
        phase, batch = seen.hung_at
        place = (phase, batch, self.progress.step if batch == 0 else 0)
        if hung[-1:] != [place]:
            hung.clear()
        hung.append(place)
        return replace(seen, hangs=len(hung))

    def _drop_repeated_work(
        self, parts: list[PartialResults], revived: Snapshot | None, running: RunningCall
    ) -> list[PartialResults]:
        """Return the results without those of work that is done again: new workers continue from a
        snapshot, or a rank that was a step ahead has failed."""
        if revived is not None:
            parts = collect_results_since(revived, parts, call=running.number)
        return [part.until(self.progress.step) for part in parts]

    def _compare_ranks(self, call: Call, seconds: float) -> None:
        """Compare the ranks after a call that took so long. If a worker fails now, the next call
        handles that."""
        outcomes = self._comparison.ask_ranks(self._table, self._generation, call, seconds)
        if not outcomes:
            return
        seen = classify(outcomes)
        if seen.kind == "user_error":
            self._raise_user_error(seen, outcomes)
        if seen.kind == "done":
            try:
                self._comparison.judge(self.progress.step, [getattr(each, "value", "") for each in outcomes.values()])
            except DivergenceError:
                self._generation.end(differ=True)  # the next call begins with rank 0's weights on all ranks
                raise

    def _prepare_call(self, job: Job, running: RunningCall) -> Call:
        """Return the call with the arguments that are only known when it is fanned out."""
        more = dict(job.prepare())
        if job.again == "resume":
            newest = self._table.snapshots.latest()
            lacks_change = newest is None or newest.progress.loads < self.progress.loads
            more |= {"call": running.number, "snapshot_first": lacks_change}
        return replace(job.call, arguments={**job.call.arguments, **more})

    def _is_change_due(self) -> bool:
        """Whether, before training, the group is to change. Note an outage of Ray."""
        try:
            return self._membership.has_change()
        except ClusterError:
            self._outage_raised = True
            raise

    def _wants_boundary(self, job: Job) -> bool:
        """Look for leaving workers, and for an outage of Ray, with which training cannot continue.
        Other calls, such as `save`, raise that error only once for each outage."""
        try:
            self._membership.look_for_leavers()
            self._outage_raised = False
        except ClusterError:
            if self._outage_raised and job.again != "resume":
                return False
            self._outage_raised = True
            raise
        return job.again == "resume" and self._membership.wants_boundary()

    # -- failures and changes -------------------------------------------------------------------------

    def _ready_call(self, *, max_failures: int, replaces: bool = False) -> RunningCall:
        """Make sure that the group is up before a call, also after failures of idle workers, and
        that its state is not undefined, unless the call replaces it."""
        if not self.active:
            raise NotActiveError("this trainer was shut down: to continue, create a new one, and load what you saved")
        if not replaces:
            self._check_defined()
        call = RunningCall(self._calls, max_failures, len(self.recoveries), replaces)
        outer = self._running
        if outer is not None and outer.max_failures >= 0:  # a callback's call during training uses up what is left
            retries = max(outer.max_failures - self._log.failures_since(outer.recoveries_before), 0)
            if max_failures < 0 or retries < max_failures:
                call = replace(call, max_failures=outer.max_failures, recoveries_before=outer.recoveries_before)
        attempts = 0
        while True:
            attempts += 1
            seen = self._observe_idle()
            if seen.kind == "done":
                if self._generation.up or self._generation.form(self._table.members()):
                    if not replaces:
                        self._check_defined()  # Ctrl-C may have ended the load before its ranks could answer
                    return call
                members = self._table.members()
                if attempts <= FORM_AT_MOST or any(self._table[worker].ended is not None for worker in members):
                    continue
                seen = Observation(
                    "broken", reason="network", detail="the ranks cannot connect, although all are alive"
                )
            self._restore(seen, call)

    def _check_defined(self) -> None:
        if self.undefined:
            raise CheckpointError(failure.UNDEFINED)

    def _observe_idle(self) -> Observation:
        """Find what has happened to the generation since the last call."""
        while self._table.pump(0.0):
            pass
        members = [self._table[worker] for worker in self._table.members()]
        if not members:
            return Observation("broken", reason="restart", detail="an error ended a call while it replaced all workers")
        alive = Ok()
        seen = classify({m.worker: alive if m.ended is None else self._table.failure_of(m) for m in members})
        if seen.kind == "done" and not self._generation.up and not self._backend.in_place:
            return Observation("broken", reason="restart", detail="an error ended the generation")
        return seen

    def _restore(self, seen: Observation, call: RunningCall, *, since: float | None = None) -> Snapshot | None:
        """Make a planned change, and recover from any failure: the group is up afterwards. Return
        the snapshot that training continues from, or None if survivors continue in place."""
        since, world = self._table.clock() if since is None else since, self.world_size
        self._generation.take_seconds()  # of anything before
        phase: Phase = "recovery"
        if seen.kind == "paused":
            since = self._table.clock()
            with self._table.during("change"):
                seen = self._membership.plan()
            if seen.kind == "paused":
                phase = "growth" if seen.reason == "growth" else "change"
        if seen.kind == "done":
            return None
        with self._table.during(phase):
            return self._recovery.recover(seen, call, since=since, world=world)

    def _raise_user_error(self, seen: Observation, outcomes: Mapping[str, Outcome]) -> NoReturn:
        self._generation.end()
        assert seen.culprit is not None
        outcome = outcomes[seen.culprit]
        assert isinstance(outcome, Failed)
        failure.raise_user_error(outcome, self._table[seen.culprit])


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


def _collect_answers(outcomes: Mapping[str, Outcome]) -> PartialResults | None:
    """Return the survivors' answers, if every survivor has one."""
    if any(isinstance(outcome, (Interrupted, Failed)) for outcome in outcomes.values()):
        return None
    answers = tuple(outcome for outcome in outcomes.values() if isinstance(outcome, Ok))
    return PartialResults(answers) if answers else None
