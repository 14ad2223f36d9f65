"""Define one user call, what a worker failure means for it, and one fan-out of it over all ranks. Driver."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from raysgd.core.outcomes import Failed, Interrupted, Outcome, WorkerFailed
from raysgd.core.protocols import Call
from raysgd.engine.boundary import Boundary
from raysgd.engine.generation import Generation
from raysgd.engine.watchdog import Watchdog
from raysgd.engine.worker_table import WorkerTable

__all__ = ["FanOut", "Job", "RunningCall"]

logger = logging.getLogger("raysgd")

TICK_S = 0.1
USER_ERROR_S = 2.0
CTRL_C_S = 5.0


@dataclass(frozen=True)
class Job:
    """One user call. `again` says what happens to it after a worker failure:

    resume   it continues where the committed work ends (training)
    repeat   it starts over on the new generation (validation, reading state)
    keep     the survivors' answers are the result (user functions that should not run twice)

    `prepare` is called whenever the call is fanned out, and returns arguments to add to it. `waits_for_user` says
    whether the ranks wait for the user at the moment, which is not a hang. `paused` is called when all ranks have stopped
    at a batch boundary. It may make other calls, and returns whether only the job wanted that stop. `lead` is how many
    steps ahead of all ranks a planned stop is first proposed. `hurry_s` is how long ranks may continue after one of them
    has stopped for a planned change; with None, all stop at the same step."""

    call: Call
    again: Literal["resume", "repeat", "keep"] = "repeat"
    max_failures: int = 3
    lead: int = 2
    prepare: Callable[[], Mapping[str, Any]] = dict
    paused: Callable[[], bool] = lambda: False
    hurry_s: float | None = None
    waits_for_user: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class RunningCall:
    """The call that the engine is in: its number, how many failures it may survive, and how many recoveries there were
    before it."""

    number: int
    max_failures: int
    recoveries_before: int


class FanOut:
    """One call on all members of the generation, until each has an outcome. Owns the calls that have not ended, the
    boundary at which they are to stop, and their watchdog.

    When a rank fails, its peers are interrupted. `wants_boundary` is called several times a second, and returns whether
    all ranks should stop for a planned change. With `job.hurry_s`, ranks need not stop at the same boundary: that long
    after one of them has stopped as asked, the others are interrupted where they are.
    """

    def __init__(
        self,
        table: WorkerTable,
        generation: Generation,
        job: Job,
        wants_boundary: Callable[[Job], bool],
        *,
        hang_s: float,
    ) -> None:
        self._table, self._generation, self._workers = table, generation, table.members()
        self._job, self._wants_boundary = job, wants_boundary
        self._watchdog = Watchdog(table, self._workers, hang_s)
        self._boundary: Boundary | None = None
        self._stopped_at: float | None = None
        self._hurried = False
        self._calls: dict[str, int] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._troubled_at: float | None = None

    @property
    def outcomes(self) -> dict[str, Outcome]:
        """Return each worker's outcome, in rank order. Workers that had not answered when a user's error ended the call
        have none."""
        return {worker: self._outcomes[worker] for worker in self._workers if worker in self._outcomes}

    @property
    def troubled_at(self) -> float:
        """Return when the first rank failed, or the time now if none has."""
        return self._table.clock() if self._troubled_at is None else self._troubled_at

    def run(self, call: Call) -> None:
        """Make the call. An error that is raised here (Ctrl-C, a cancelled call, a callback's error) ends it at the
        next batch."""
        try:
            for worker in self._workers:
                self._table.begin_run(worker, call.name)
                self._calls[worker] = self._table.submit(
                    worker, "run", {"call": call}, generation=self._generation.number
                )
            while self._running() and not self._user_error_waited():
                self._table.pump(TICK_S)
                self._tick()
            self._table.forget(self._calls[worker] for worker in self._running())
        except BaseException as error:
            self._cut_short(error)
            raise

    def _tick(self) -> None:
        running = self._running()
        self._collect()
        if self._troubled_at is None and self._boundary is None and self._wants_boundary(self._job):
            self._boundary = Boundary(self._table, {w: self._calls[w] for w in running}, lead=self._job.lead)
        if self._boundary is not None:
            self._boundary.advance(self._running())
            self._hurry()
        if self._job.waits_for_user():
            self._table.note_progress(running)
        self._watchdog.tick(self._running(), others_failed=self._troubled_at is not None)

    def _running(self) -> list[str]:
        return [worker for worker in self._calls if worker not in self._outcomes]

    def _collect(self) -> None:
        for worker in self._running():
            outcome = self._table.reply(self._calls[worker])
            if outcome is None:
                continue
            if self._hurried and isinstance(outcome, Interrupted) and not outcome.reason:
                outcome = replace(outcome, asked=True)
            self._outcomes[worker] = outcome
            trouble = isinstance(outcome, (WorkerFailed, Failed)) or (
                isinstance(outcome, Interrupted) and not outcome.asked
            )
            if trouble and self._troubled_at is None:
                self._troubled_at = self._table.clock()
                self._generation.interrupt(self._workers)

    def _hurry(self) -> None:
        """Interrupt the ranks that are still running `hurry_s` after another one has stopped. They may be waiting for
        that rank in a collective, which only its time limit would end."""
        stopped = [o for o in self._outcomes.values() if isinstance(o, Interrupted) and o.asked]
        if self._job.hurry_s is None or not stopped or self._hurried:
            return
        self._stopped_at = self._stopped_at or self._table.clock()
        if self._running() and self._table.clock() - self._stopped_at > self._job.hurry_s:
            self._hurried = True
            self._generation.interrupt(self._workers)

    def _user_error_waited(self) -> bool:
        """Return whether peers that are busy outside any collective have had enough time to end, after a user's
        error."""
        failed = any(isinstance(outcome, Failed) for outcome in self._outcomes.values())
        return failed and self._troubled_at is not None and self._table.clock() - self._troubled_at > USER_ERROR_S

    def _cut_short(self, error: BaseException) -> None:
        """Stop the call at the next batch. The trainer stays usable. Ranks that do not stop in time are killed."""
        what = "interrupted" if isinstance(error, KeyboardInterrupt) else f"stopped by {type(error).__name__}"
        logger.warning("%s: asking %d worker(s) to stop at their next batch", what, len(self._workers))
        self._generation.end()
        self._generation.interrupt(self._workers)
        deadline = self._table.clock() + CTRL_C_S
        while self._running() and self._table.clock() < deadline:
            self._table.pump(TICK_S)
            self._collect()
        for worker in self._running():
            self._table.kill(worker, "worker death", "it did not stop in time when the call was interrupted")
