"""Run calls on the workers, whatever fails: the only loop that handles failures. Driver.

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

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

from raysgd.config import ElasticConfig
from raysgd.core.decisions.policy import Observation, Recovery, classify
from raysgd.core.measures.progress import Progress
from raysgd.core.outcomes import Failed, Interrupted, Ok, Outcome
from raysgd.core.protocols import Call
from raysgd.core.snapshot import Snapshot
from raysgd.engine import failure, takeover
from raysgd.engine.call import FanOut, Job, PartialResults, RunningCall, collect_results_since
from raysgd.engine.call_lock import CallLock
from raysgd.engine.generation import Generation
from raysgd.engine.membership import Membership
from raysgd.engine.rank_comparison import Comparison
from raysgd.engine.recovery import RecoveryLog, RecoveryLoop
from raysgd.engine.worker_table import Phase, WorkerTable
from raysgd.errors import CheckpointError, ClusterError, DivergenceError, NotActiveError, counted

FORM_AT_MOST = 3


class CallLoop:
    """Owns the numbers of the calls, those that are to be run again if all workers fail, and
    whether the state is defined. Only the thread that has claimed the `lock` may run one."""

    def __init__(
        self,
        table: WorkerTable,
        generation: Generation,
        membership: Membership,
        recovery: RecoveryLoop,
        log: RecoveryLog,
        lock: CallLock,
        elastic: ElasticConfig,
    ) -> None:
        self._table, self._generation, self._membership = table, generation, membership
        self._recovery, self._log, self._lock = recovery, log, lock
        self._comparison = Comparison(elastic)
        self._keeps_snapshots = elastic.snapshot_every is not None
        self.active, self._end = True, Progress()
        self._number = 0
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

    def end(self) -> None:
        """Run no further call. `progress` stays as it is now."""
        self._end, self.active = self.progress, False

    def take_over(self, trained: int | None, reached: Progress | None, recoveries: Sequence[Recovery]) -> bool:
        """Continue the numbers of an earlier driver with its workers, and its call if one was
        training. Return False if they cannot be taken over."""
        owners = self._table, self._generation, self._recovery, self._log
        call = takeover.take_over(*owners, trained, reached, recoveries, keeps_snapshots=self._keeps_snapshots)
        if call is None or trained is None:
            return False
        self._number, self.trained, self.changes = max(call[0], trained), trained, self.progress.loads
        self._interrupted = call if call[0] > trained else None
        return True

    def continue_call(self, measured: PartialResults) -> None:
        """Let the next call that trains continue the one in which the loaded state was saved, with
        what that had measured."""
        self._interrupted = None, [measured]

    @property
    def progress(self) -> Progress:
        """The progress of the most advanced rank, as far as the driver knows."""
        if not self.active:
            return self._end
        reported = self._table.progress_of(self._table.members()).values()
        return max(reported, key=lambda each: each.order, default=Progress())

    @property
    def reached(self) -> Progress:
        """How far training has come, also if all workers have failed since, and work of calls that
        have returned must be done again."""
        ends = (end for _, end in self._finished.values() if end.step < sys.maxsize)
        return max((self.progress, *ends), key=lambda each: each.place)

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
        if self._keeps_snapshots and self._table.group.elastic and self._table.snapshots.latest() is None:
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

    # -- calls ----------------------------------------------------------------------------------------

    def run(self, job: Job) -> list[PartialResults]:
        """Run a job to its end, whatever fails. Return the results of its parts, in order."""
        with self._lock.claim(f"the call {job.call.name!r}"):
            self._number += 1
            running = self.ready_call(max_failures=job.max_failures, replaces=job.replaces)
            parts: list[PartialResults] = []
            if job.again == "resume":
                if self._interrupted is not None:
                    (number, parts), self._interrupted = self._interrupted, None
                    running = running if number is None else replace(running, number=number)
                if self._is_change_due():
                    self.restore(Observation("paused"), running)
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
            if job.redo and self._table.group.elastic:
                self._finished[running.number] = job, self.progress
            return parts

    def _note_end(self, job: Job, running: RunningCall) -> None:
        """Note how far a call has trained that an error has ended: it is to be run again up to
        there."""
        end = self.progress
        if (
            job.redo
            and job.again == "resume"
            and self._table.group.elastic
            and end.call == running.number
            and end.batches
        ):
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
            revived = self.restore(seen, begun, since=fan_out.troubled_at)
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
        if len(self._table.members()) < least:
            detail = (
                f"{counted(len(self._table.members()), 'worker is', 'workers are')} left, and training needs {least}"
            )
            self.restore(Observation("broken", reason="restart", detail=detail), running)

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

    def ready_call(self, *, max_failures: int, replaces: bool = False) -> RunningCall:
        """Make sure that the group is up before a call, also after failures of idle workers, and
        that its state is not undefined, unless the call replaces it."""
        if not self.active:
            raise NotActiveError("this trainer was shut down: to continue, create a new one, and load what you saved")
        if not replaces:
            self._check_defined()
        call = RunningCall(self._number, max_failures, len(self._log.recoveries), replaces)
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
            self.restore(seen, call)

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
        if seen.kind == "done" and not self._generation.up and not self._generation.in_place:
            return Observation("broken", reason="restart", detail="an error ended the generation")
        return seen

    def restore(self, seen: Observation, call: RunningCall, *, since: float | None = None) -> Snapshot | None:
        """Make a planned change, and recover from any failure: the group is up afterwards. Return
        the snapshot that training continues from, or None if survivors continue in place."""
        since, world = self._table.clock() if since is None else since, len(self._table.members())
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


def _collect_answers(outcomes: Mapping[str, Outcome]) -> PartialResults | None:
    """Return the survivors' answers, if every survivor has one."""
    if any(isinstance(outcome, (Interrupted, Failed)) for outcome in outcomes.values()):
        return None
    answers = tuple(outcome for outcome in outcomes.values() if isinstance(outcome, Ok))
    return PartialResults(answers) if answers else None
