"""Define one user call, what a worker failure means for it, and one fan-out of it over all ranks.
Driver."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from raysgd.core.messages import StackReport
from raysgd.core.outcomes import CollectivePlace, Failed, Interrupted, Ok, Outcome
from raysgd.core.policy import drift
from raysgd.core.protocols import Call
from raysgd.engine.boundary import Boundary
from raysgd.engine.comparison import Comparison
from raysgd.engine.generation import Generation
from raysgd.engine.watchdog import Watchdog
from raysgd.engine.worker_table import WorkerTable
from raysgd.errors import DivergenceError, counted

logger = logging.getLogger("raysgd")

TICK_S = 0.1
USER_ERROR_S = 2.0
ASK_EVERY_S = 1.0
CTRL_C_S = 5.0


@dataclass(frozen=True)
class Job:
    """One user call. `again` says what happens to it after a worker failure:

    resume   it continues where the committed work ends (training)
    repeat   it starts over on the new generation (validation, reading state)
    keep     the survivors' answers are the result (user functions that should not run twice)

    `prepare` is called whenever the call is fanned out, and returns arguments to add to it.
    `is_waiting` says whether the ranks wait at the moment for the user, or for a transfer that
    moves, which is not a hang. `paused` is called when all ranks have stopped at a batch boundary.
    It may make other calls, and returns whether only the job wanted that stop. `lead` is how many
    steps ahead of all ranks a planned stop is first proposed. `hurry_s` is how long ranks may
    continue after one of them has stopped for a planned change; with None, all stop at the same
    step. With `needs_state`, the call must find the state that the workers had when it began: if
    they all fail, it is not made again on an older one. With `redo`, it is run again, before a
    later call, if all workers fail and continue from a snapshot that was taken in it. `compare` is
    the call that returns a rank's `Summary`, as text; with None, ranks are not compared after this
    one."""

    call: Call
    again: Literal["resume", "repeat", "keep"] = "repeat"
    max_failures: int = 3
    lead: int = 2
    prepare: Callable[[], Mapping[str, Any]] = dict
    paused: Callable[[], bool] = lambda: False
    hurry_s: float | None = None
    is_waiting: Callable[[], bool] = lambda: False
    needs_state: bool = False
    redo: bool = False
    compare: Call | None = None


@dataclass(frozen=True)
class RunningCall:
    """The call that the engine is in: its number, how many failures it may survive, and how many
    recoveries there were before it."""

    number: int
    max_failures: int
    recoveries_before: int


class FanOut:
    """One call on all members of the generation, until each has an outcome. Owns the calls that
    have not ended, the boundary at which they are to stop, and their watchdog.

    When a rank fails, its peers are interrupted. `wants_boundary` is called several times a second,
    and returns whether all ranks should stop for a planned change. With `job.hurry_s`, ranks need
    not stop at the same boundary: that long after one of them has stopped as asked, the others are
    interrupted where they are. If the ranks' weights are compared every few steps, `comparison`
    gets what they report.
    """

    def __init__(
        self,
        table: WorkerTable,
        generation: Generation,
        job: Job,
        wants_boundary: Callable[[Job], bool],
        *,
        hang_s: float,
        comparison: Comparison,
    ) -> None:
        self._table, self._generation, self._workers = table, generation, table.members()
        self._job, self._wants_boundary, self._comparison = job, wants_boundary, comparison
        self._watchdog = Watchdog(table, self._workers, hang_s)
        self._boundary: Boundary | None = None
        self._stopped_at: float | None = None
        self._hurried = False
        self._calls, self._tick_at = table.open_calls(lambda: generation.interrupt(self._workers)), 0.0
        self._evicted: set[str] = set()
        self._asked, self._asked_at = -1, 0.0
        self._extra: dict[str, CollectivePlace] = {}
        self._answered: dict[str, CollectivePlace] = {}

    @property
    def outcomes(self) -> dict[str, Outcome]:
        """Return each worker's outcome, in rank order. Workers that had not answered when a user's
        error ended the call have none."""
        outcomes = self._calls.outcomes
        return {worker: outcomes[worker] for worker in self._workers if worker in outcomes}

    @property
    def troubled_at(self) -> float:
        """Return when the first rank failed, or the time now if none has."""
        return self._table.clock() if self._calls.troubled_at is None else self._calls.troubled_at

    def run(self, call: Call) -> None:
        """Make the call. An error that is raised here (Ctrl-C, a cancelled call, a callback's
        error) ends it at the next batch."""
        try:
            arguments = {"call": call}  # the same for all, because a group pickles it once
            for worker in self._workers:
                self._table.begin_run(worker, call.name)
                number = self._table.group.submit(worker, "run", arguments, generation=self._generation.number)
                self._calls.expect(worker, number)
            while self._calls.running and not self._user_error_waited():
                self._table.pump(TICK_S)
                self._calls.collect(self._seen)
                if self._table.clock() >= self._tick_at:  # not after each message, because it looks at every rank
                    self._tick()
                    self._tick_at = self._table.clock() + TICK_S
                if self._boundary is not None:
                    self._boundary.advance(self._calls.running)
                    self._hurry()
            self._table.forget(self._calls.running.values())
        except BaseException as error:
            with self._table.during("interruption"):
                self._cut_short(error)
            raise

    def _tick(self) -> None:
        running = list(self._calls.running)
        if running and self._calls.troubled_at is None and self._boundary is None and self._wants_boundary(self._job):
            self._boundary = Boundary(self._table, dict(self._calls.running), lead=self._job.lead)
        if self._job.is_waiting():
            self._table.note_progress(running)
        if self._comparison.by_steps:
            self.compare()
        self._end_extra_calls()
        self._watchdog.tick(
            running,
            interrupted_s=None if self._calls.troubled_at is None else self._table.clock() - self._calls.troubled_at,
            has_survivor=any(isinstance(outcome, Interrupted) for outcome in self._calls.outcomes.values()),
        )

    def compare(self) -> bool:
        """Compare what all ranks have reported after the same steps. Return whether any of them was
        evicted in this call: its process can have made the rest of the call before it ended."""
        for step, texts in self._table.take_summaries(self._workers):
            self.judge(step, [texts[worker] for worker in self._workers])
        return bool(self._evicted)

    def judge(self, step: int, texts: Iterable[str]) -> bool:
        """Compare the ranks' summaries, which are in rank order. Return whether any rank was
        evicted."""
        try:
            ranks, why = self._comparison.judge(step, dict(enumerate(texts)))
        except DivergenceError:
            self._generation.end()  # also after the last step: the next one begins with rank 0's weights on all ranks
            raise
        # One that was evicted differs after later steps, too.
        found = {self._workers[rank] for rank in ranks} - self._evicted
        for worker in found:
            self._evicted.add(worker)
            logger.error("rank %s on node %s: %s", self._table[worker].rank, self._table[worker].machine, why)
            with self._table.during("eviction"):
                self._table.kill(worker, "divergence", why)
        return bool(found)

    def _seen(self, worker: str, outcome: Outcome) -> Outcome:
        if worker in self._extra and isinstance(outcome, Interrupted) and not outcome.place.name:
            outcome = replace(outcome, place=self._extra[worker], asked=False)  # a function that was stopped there
        if self._hurried and isinstance(outcome, Interrupted) and not outcome.reason:
            outcome = replace(outcome, asked=True)
        return outcome

    def _end_extra_calls(self) -> None:
        """Interrupt the ranks if some wait in a collective call that others do not make, which only
        that call's time limit would end: one of them is beyond the last call of a rank that has
        finished, or all wait, after different numbers of calls."""
        now, running = self._table.clock(), self._calls.running
        if not running or len(self._workers) < 2 or self._calls.troubled_at is not None:
            self._asked_at = now
            return
        answers = self._table.take_answers(StackReport, self._asked)
        self._answered |= {worker: answer.place for worker, answer in answers}
        waiting = {worker: place for worker, place in self._answered.items() if worker in running and place.name}
        made = [o.collectives for o in self._calls.outcomes.values() if isinstance(o, Ok) and o.collectives >= 0]
        beyond = {worker: place for worker, place in waiting.items() if made and place.count > min(made)}
        places = {rank: waiting[worker] for rank, worker in enumerate(self._workers) if worker in waiting}
        if beyond or (len(waiting) == len(running) and drift(places)):
            self._extra = beyond or waiting
            self._calls.trouble()
            return
        moved_at = {worker: self._table[worker].moved_at for worker in running}
        if now - self._asked_at > max(ASK_EVERY_S, (now - max(moved_at.values())) / 2):  # later and later
            still = [worker for worker, moved in moved_at.items() if moved < self._asked_at]
            wanted = still if made or len(still) == len(running) else []
            self._answered = {}
            self._asked, self._asked_at = self._table.request_stacks(wanted) if wanted else -1, now

    def _hurry(self) -> None:
        """Interrupt the ranks that are still running `hurry_s` after another one has stopped. They
        may be waiting for that rank in a collective, which only its time limit would end."""
        stopped = [o for o in self._calls.outcomes.values() if isinstance(o, Interrupted) and o.asked]
        if self._job.hurry_s is None or not stopped or self._hurried:
            return
        self._stopped_at = self._stopped_at or self._table.clock()
        if self._calls.running and self._table.clock() - self._stopped_at > self._job.hurry_s:
            self._hurried = True
            self._generation.interrupt(self._workers)

    def _user_error_waited(self) -> bool:
        """Return whether peers that are busy outside any collective have had enough time to end,
        after a user's error."""
        if self._calls.troubled_at is None or self._table.clock() - self._calls.troubled_at <= USER_ERROR_S:
            return False
        return any(isinstance(outcome, Failed) for outcome in self._calls.outcomes.values())

    def _cut_short(self, error: BaseException) -> None:
        """Stop the call at the next batch. The trainer stays usable. Ranks that do not stop in time
        are killed."""
        what = "interrupted" if isinstance(error, KeyboardInterrupt) else f"stopped by {type(error).__name__}"
        logger.warning("%s: asking %s to stop at the next batch", what, counted(len(self._workers), "worker"))
        self._generation.end()
        self._generation.interrupt(self._workers)
        deadline = self._table.clock() + CTRL_C_S
        while self._calls.running and self._table.clock() < deadline:
            self._table.pump(TICK_S)
            self._calls.collect(self._seen)
        for worker in list(self._calls.running):
            self._table.kill(worker, "worker death", "it did not stop in time when the call was interrupted")
