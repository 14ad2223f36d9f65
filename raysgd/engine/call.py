"""Define a user call, what its parts measured, and a fan-out of it over all ranks. Driver."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from raysgd.constants import BATCH_COUNT, NUM_SAMPLES
from raysgd.core.outcomes import Failed, Interrupted, Ok, Outcome
from raysgd.core.protocols import Call
from raysgd.core.snapshot import Snapshot
from raysgd.engine.boundary import Boundary
from raysgd.engine.generation import Generation
from raysgd.engine.watchdog import Watchdog, ask
from raysgd.engine.worker_table import WorkerTable
from raysgd.errors import counted
from raysgd.workers.calls import has_large

logger = logging.getLogger("raysgd")

TICK_S = 0.1
USER_ERROR_S = 2.0
CTRL_C_S = 5.0


@dataclass(frozen=True)
class Job:
    """One user call.

    again        what happens to it after a worker failure: "resume", it continues where the
                 committed work ends; "repeat", it starts over; "keep", the survivors' answers are
                 the result
    lead         how many steps ahead of all ranks a planned stop is first proposed
    prepare      returns more arguments, whenever the call is fanned out
    hurry_s      how long ranks may continue after one has stopped for a planned change; None: all
                 stop at the same step
    is_waiting   whether the ranks wait for the user, or for a transfer that moves, which is not a
                 hang
    on_return    called with each rank whose call has ended without an error
    needs_state  whether it must find the state with which it began: if all workers fail, it is not
                 made again on an older one
    replaces     whether it replaces the state, which may be undefined then
    redo         whether to run it again, before a later call, if all workers fail and continue from
                 a snapshot that was taken in it
    compare      the call that returns the sums of a rank's weights; None: the ranks are not
                 compared
    """

    call: Call
    again: Literal["resume", "repeat", "keep"] = "repeat"
    max_failures: int = 3
    lead: int = 2
    prepare: Callable[[], Mapping[str, Any]] = dict
    hurry_s: float | None = None
    is_waiting: Callable[[], bool] = lambda: False
    on_return: Callable[[int], None] = lambda rank: None
    needs_state: bool = False
    replaces: bool = False
    redo: bool = False
    compare: Call | None = None


@dataclass(frozen=True)
class RunningCall:
    """The call that the engine is in, how many recoveries there were before it, and whether it
    `replaces` the state, of which it needs none then, or has begun to change it."""

    number: int
    max_failures: int
    recoveries_before: int
    replaces: bool = False
    changes: bool = False


@dataclass(frozen=True)
class PartialResults:
    """What the ranks of one generation measured in their part of a call, in rank order."""

    outcomes: tuple[Outcome, ...]
    generation: int = 0  # EARLIER: of a script before this one

    @property
    def values(self) -> list[Any]:
        """The results that ranks reported, complete or partial."""
        return [value for outcome in self.outcomes if (value := getattr(outcome, "value", None)) is not None]

    def until(self, step: int) -> PartialResults:
        """The results of the ranks that are not known to have gone beyond this step."""
        return replace(self, outcomes=tuple(outcome for outcome in self.outcomes if _step_of(outcome) <= step))

    @property
    def end(self) -> int:
        """The last step that any rank is known to have committed in it."""
        return max(map(_step_of, self.outcomes), default=0)


def _step_of(outcome: Outcome) -> int:
    return outcome.progress.step


EARLIER = -1  # the generation of what a script before this one has measured


def collect_results_since(snapshot: Snapshot, parts: Sequence[PartialResults], *, call: int) -> list[PartialResults]:
    """Collect the results that still count in a call that continues from a snapshot: parts that
    ended before it, and, of the part in which it was taken, what the snapshot itself contains."""
    taken_at = snapshot.progress.step
    if snapshot.call < call:  # only what an earlier script had measured in this call, up to the state that it has left
        return [part for part in parts if part.generation == EARLIER and part.end <= taken_at]
    if snapshot.partial is None:
        return [part.until(taken_at) for part in parts]  # a survivor gave its state when a generation ended
    # A snapshot without any results was taken between two generations, so a part that ended at its step counts, too.
    is_empty = not any(map(snapshot.partial.metrics.get, (BATCH_COUNT, NUM_SAMPLES)))
    before = [part for part in parts[:-1] if part.end < taken_at or (is_empty and part.end == taken_at)]
    return [*before, PartialResults((Ok(snapshot.partial, snapshot.progress),))]


class FanOut:
    """One call on all members of the generation, until each has an outcome. Owns the calls that
    have not ended, the boundary at which they are to stop, and what watches them.

    When a rank fails, its peers are interrupted. `wants_boundary` is called several times a second,
    and returns whether all ranks should stop for a planned change. With `job.hurry_s`, ranks need
    not stop at the same boundary: that long after one of them has stopped as asked, the others are
    interrupted where they are.
    """

    def __init__(
        self,
        table: WorkerTable,
        generation: Generation,
        job: Job,
        wants_boundary: Callable[[Job], bool],
    ) -> None:
        self._table, self._generation, self._workers = table, generation, table.members()
        self._job, self._wants_boundary = job, wants_boundary
        self._calls, self._tick_at = table.open_calls(lambda: generation.interrupt(self._workers)), 0.0
        self._watchdog = Watchdog(table, self._workers, generation.limits.hang_s)
        self._boundary: Boundary | None = None
        self._stopped_at: float | None = None
        self._hurried = False

    @property
    def outcomes(self) -> dict[str, Outcome]:
        """The outcomes, by rank. After a user's error, some ranks may have none."""
        outcomes = self._calls.outcomes
        return {worker: outcomes[worker] for worker in self._workers if worker in outcomes}

    @property
    def troubled_at(self) -> float:
        """When the first rank failed, or the time now if none has."""
        return self._table.clock() if self._calls.troubled_at is None else self._calls.troubled_at

    def run(self, call: Call) -> None:
        """Make the call. An error that is raised here (Ctrl-C, for example) ends it at a batch."""
        try:
            arguments = {"call": call}  # the same for all, because a group pickles it once
            if has_large(call.arguments):
                if not self._keep(arguments):
                    return
                arguments = {}
            for worker in self._workers:
                self._table.begin_run(worker, call.name)
                number = self._table.group.submit(worker, "run", arguments, generation=self._generation.number)
                self._calls.expect(worker, number)
            while self._calls.running and not self._has_waited_for_peers():
                self._table.pump(TICK_S)
                self._calls.collect(self._take_outcome)
                if self._table.clock() >= self._tick_at:  # not after each message, because it looks at every rank
                    self._tick()
                    self._tick_at = self._table.clock() + TICK_S
                if self._boundary is not None:
                    self._boundary.advance(self._calls.running)
                    self._hurry()
        except BaseException as error:
            with self._table.during("interruption"):
                self._abandon_call(error)
            raise
        finally:
            self._table.forget(self._calls.running.values())

    def _keep(self, arguments: Mapping[str, Any]) -> bool:
        """Let all ranks have a large argument before any begins, which would wait for the others in
        a collective call. Return False if one has failed, and so has the call."""
        for worker in self._workers:
            self._table.begin_run(worker, arguments["call"].name)
        limit_s, number = self._generation.limits.hang_s, self._generation.number
        outcomes = ask(self._table, self._workers, "keep", arguments, limit_s=limit_s, generation=number)
        if all(isinstance(outcome, Ok) for outcome in outcomes.values()):
            return True
        without = "another rank did not get the arguments of the call"
        self._calls.outcomes = {
            worker: Interrupted(None, without, outcome.progress) if isinstance(outcome, Ok) else outcome
            for worker, outcome in outcomes.items()
        }
        return False

    def _tick(self) -> None:
        running = list(self._calls.running)
        if running and self._calls.troubled_at is None and self._boundary is None and self._wants_boundary(self._job):
            self._boundary = Boundary(self._table, dict(self._calls.running), lead=self._job.lead)
        if self._job.is_waiting():
            self._table.note_progress(running)
        self._watchdog.tick(
            running,
            interrupted_s=None if self._calls.troubled_at is None else self._table.clock() - self._calls.troubled_at,
            has_survivor=any(isinstance(outcome, Interrupted) for outcome in self._calls.outcomes.values()),
        )

    def _take_outcome(self, worker: str, outcome: Outcome) -> Outcome:
        """Tell the job who has returned. Return the outcome with what the group knows of it."""
        if isinstance(outcome, Ok):
            self._job.on_return(self._workers.index(worker))
        if self._hurried and isinstance(outcome, Interrupted) and not outcome.reason:
            outcome = replace(outcome, asked=True)
        return outcome

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

    def _has_waited_for_peers(self) -> bool:
        """Return whether busy peers have had enough time to end after a user's error."""
        if self._calls.troubled_at is None or self._table.clock() - self._calls.troubled_at <= USER_ERROR_S:
            return False
        return any(isinstance(outcome, Failed) for outcome in self._calls.outcomes.values())

    def _abandon_call(self, error: BaseException) -> None:
        """Stop the call at the next batch, and kill ranks that do not stop in time."""
        what = "interrupted" if isinstance(error, KeyboardInterrupt) else f"stopped by {type(error).__name__}"
        logger.warning("%s: asking %s to stop at the next batch", what, counted(len(self._workers), "worker"))
        self._generation.end()
        self._generation.interrupt(self._workers)
        waited_s = 0.0  # for answers: this process may also be stopped while it sends, or be in a callback
        while self._calls.running and waited_s < CTRL_C_S:
            began = self._table.clock()
            self._table.pump(TICK_S)
            waited_s += min(self._table.clock() - began, TICK_S)
            self._calls.collect(self._take_outcome)
        for worker in list(self._calls.running):
            self._table.kill(worker, "worker death", "it did not stop in time when the call was interrupted")
