"""Find workers that do not end their calls, and kill those that block the others. Driver."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from raysgd.core import hang
from raysgd.core.channel.messages import StackReport
from raysgd.core.control import longest_silence_s
from raysgd.core.outcomes import Outcome
from raysgd.engine.worker_table import KILLED_S, LOOK_S, WorkerTable

logger = logging.getLogger("raysgd")

# A worker sends "alive" every second. One that has missed two of these messages is considered silent.
SILENT_S = 2.5
# For a rank to leave a collective call, after it was interrupted: at least, and as a part of the limit of a hang.
LEAVE_S, LEAVE_PART = 10.0, 0.1
WARN_PART = 0.1  # of the limit of a set-up


def ask(
    table: WorkerTable,
    workers: Iterable[str],
    verb: str,
    arguments: Mapping[str, Any] | Callable[[str], Mapping[str, Any]],
    *,
    limit_s: float,
    generation: int = 0,
    on_trouble: Callable[[], None] = lambda: None,
) -> dict[str, Outcome]:
    """Make one call on several workers and wait for it. `on_trouble` is called once, when one fails
    or is late: peers may wait for it."""
    calls, workers = table.open_calls(on_trouble), list(workers)
    shared = {} if callable(arguments) else dict(arguments)
    try:
        for worker in workers:
            values = dict(arguments(worker)) if callable(arguments) else shared
            calls.expect(worker, table.group.submit(worker, verb, values, generation=generation))
        limit = TimeLimit(table, verb, limit_s)
        calls.collect()
        while calls.running:
            table.pump(LOOK_S)  # first, as this notices if the process was stopped while it asked
            calls.collect()
            if calls.running and limit.tick(calls.running):
                calls.note_trouble()  # ranks that only wait for the late ones fail then, too
        return {worker: calls.outcomes[worker] for worker in workers}
    finally:  # after an error (Ctrl-C, a cancelled call), nothing waits for these any more
        table.forget(calls.running.values())


class TimeLimit:
    """Watches calls of which each must end within `limit_s`, or move data. A worker whose call does
    not, or whose process is stopped, is killed, and counts as failed."""

    def __init__(self, table: WorkerTable, verb: str, limit_s: float) -> None:
        self._table, self._verb, self._limit_s = table, verb, limit_s
        self._given_up_at: dict[str, float] = {}  # of those that were killed
        self._look_at = table.clock()
        self._warn_at = table.clock() + limit_s * WARN_PART

    def tick(self, running: Collection[str]) -> bool:
        """Whether the time of some was up."""
        table = self._table
        if table.clock() >= self._warn_at:
            self._warn_at = math.inf
            if self._verb in hang.USERS_PART:
                warn_of_slow(table, list(running), self._verb, self._limit_s)
        if table.clock() >= self._look_at:
            self._look_at = table.clock() + LOOK_S
            for worker in list(running):
                end_if_silent(table, worker, self._verb)
        over_s = {w: table.clock() - self._given_up_at.get(w, table[w].moved_at + self._limit_s) for w in running}
        if max(over_s.values()) <= 0:
            return False
        late = [worker for worker, seconds in over_s.items() if seconds > -SILENT_S]  # they were asked together
        self._end(late)
        self._given_up_at |= dict.fromkeys(late, table.clock() + KILLED_S)
        return True

    def _end(self, late: Iterable[str]) -> None:
        """Kill the workers that do not even send "alive", or all of them if all do. Those that were
        killed before have ended by now, whatever is known of it."""
        table = self._table
        remaining = [worker for worker in late if table[worker].killed_for is None]
        table.end_unreported(worker for worker in late if worker not in remaining)
        silent = [worker for worker in remaining if table.silent_for(worker) > SILENT_S]
        for worker, story in collect_unfinished(table, silent or remaining, self._verb, self._limit_s).items():
            table.kill(worker, "hang", story)


def warn_of_slow(table: WorkerTable, workers: Sequence[str], verb: str, limit_s: float) -> None:
    """Log where workers are whose set-up has taken a tenth of its limit: those that block the
    others."""
    reports = ask_for_stacks(table, workers)
    for worker in hang.blocking_ranks(reports) or list(reports):
        logger.warning("%s", hang.describe_slow(reports[worker], verb, limit_s * WARN_PART, limit_s))


def end_if_silent(table: WorkerTable, worker: str, verb: str) -> None:
    """Kill the worker if it sends not even "alive": its process is stopped."""
    if table[worker].killed_for is None and table.silent_for(worker) > table.silent_s:
        table.kill(worker, "hang", hang.describe_unfinished(report_of(table, worker, None), verb, table.silent_s))


def collect_unfinished(table: WorkerTable, workers: Sequence[str], verb: str, limit_s: float) -> dict[str, str]:
    """Say, for each of these workers that is still busy, what it did not finish in time, and where
    it is. Workers that block the others come first."""
    reports = ask_for_stacks(table, workers)
    blocking = hang.blocking_ranks(reports) or list(reports)
    waiting = [worker for worker in reports if worker not in blocking]
    first = ", ".join(f"rank {reports[worker].rank}" for worker in blocking)
    stories = {worker: hang.describe_unfinished(reports[worker], verb, limit_s) for worker in blocking}
    for worker in blocking:
        if reports[worker].stack is not None:
            table.set_unfinished(worker, stories[worker])
    return stories | {worker: f"waited for {first} in '{verb}' for {limit_s:g} s" for worker in waiting}


def ask_for_stacks(table: WorkerTable, workers: Sequence[str]) -> dict[str, hang.RankReport]:
    """Ask the workers where they are. Return the answers of those that are still busy."""
    number, answers, deadline = table.request_stacks(workers), dict[str, StackReport](), table.clock() + SILENT_S
    while (
        len(answers) < len(workers) and table.clock() < deadline
    ):  # they answer at once, unless their process is stopped
        table.pump(0.05)
        answers |= dict(table.take_answers(StackReport, number))
    return {w: report_of(table, w, answers.get(w)) for w in workers if table[w].busy is not None}


def report_of(table: WorkerTable, worker: str, answer: StackReport | None) -> hang.RankReport:
    """Find where a worker is, from its answer, or from what it reported before."""
    info = table[worker]
    return hang.RankReport(
        rank=info.rank,
        node=info.machine,
        phase=info.progress.phase if answer is None else answer.phase,
        batch=info.progress.batches if answer is None else answer.batch,
        stack=None if answer is None else answer.frames,
        silent_s=table.silent_for(worker),
    )


class Watchdog:
    """Watches one running call on `workers`. Kills the ranks that block the others, or all if it
    cannot tell which, and ranks that do not leave a collective call."""

    def __init__(self, table: WorkerTable, workers: Sequence[str], limit_s: float) -> None:
        self._table, self._workers, self._limit_s = table, workers, limit_s
        self._asked_at: float | None = None
        self._round = 0
        self._warned_at = self._judged_at = 0.0
        self._stacks: dict[str, StackReport] = {}

    def tick(self, running: Sequence[str], *, interrupted_s: float | None = None, has_survivor: bool = False) -> None:
        """Log or kill ranks that have made no progress for too long. All ranks were interrupted
        `interrupted_s` ago, because one has failed; so ranks that waited for the running ones have
        ended their calls already. With `has_survivor`, one of these has the state of the
        training."""
        now = self._table.clock()
        self._stacks |= dict(self._table.take_answers(StackReport, self._round))
        quiet = self._quiet(running, now)
        leaving = interrupted_s is not None and interrupted_s < max(LEAVE_S, self._limit_s * LEAVE_PART)
        stuck = has_survivor and interrupted_s is not None and not leaving and quiet >= LEAVE_S
        if self._asked_at is None:
            late = quiet >= self._limit_s or (stuck and now - self._judged_at > LEAVE_S / 2)
            if late or (quiet >= self._limit_s / 10 and now - self._warned_at > self._limit_s / 3):
                self._ask(running)
            return
        if quiet < self._limit_s / 10:
            self._asked_at = None  # it makes progress again
        elif all(worker in self._stacks or self._table.silent_for(worker) > SILENT_S for worker in running):
            if not (stuck and self._kill_in_collectives(running, interrupted_s or 0.0)):
                self._judge(running, quiet, others_failed=interrupted_s is not None, leaving=leaving)
            self._asked_at, self._judged_at = None, now

    def _kill_in_collectives(self, running: Sequence[str], interrupted_s: float) -> bool:
        """Kill the ranks that are still in a collective call, which should have failed when they
        were interrupted. Return whether there are any."""
        waiting = [w for w in running if w in self._stacks and hang.is_in_collective(self._stacks[w].frames)]
        for worker in waiting:
            story = hang.describe_rank(self._report(worker))
            why = f"it did not leave a collective call within {interrupted_s:.0f} s after it was interrupted: {story}"
            logger.warning("killing a rank because %s", why)
            self._table.kill(worker, "hang", why)
        return bool(waiting)

    def _quiet(self, running: Sequence[str], now: float) -> float:
        """For how long no rank has made progress, at least. If some do not answer, only they count.
        In a large group, progress is reported only now and then."""
        silent = {worker: self._table.silent_for(worker) for worker in running}
        still = {worker: now - self._table[worker].moved_at for worker in running}
        ranks = len(self._workers)
        frozen = [
            max(still[worker] - longest_silence_s(ranks, 1), min(still[worker], seconds))
            for worker, seconds in silent.items()
            if seconds > SILENT_S
        ]
        if frozen:
            return max(frozen)
        return max(min(still.values(), default=0.0) - longest_silence_s(ranks, len(running)), 0.0)

    def _ask(self, running: Sequence[str]) -> None:
        self._stacks = {}
        self._asked_at = self._table.clock()
        self._round = self._table.request_stacks(running)

    def _report(self, worker: str) -> hang.RankReport:
        return report_of(self._table, worker, self._stacks.get(worker))

    def _judge(self, running: Sequence[str], quiet: float, *, others_failed: bool, leaving: bool) -> None:
        reports = {worker: self._report(worker) for worker in running}
        blocking = hang.blocking_ranks(reports, still_s=min(quiet, self._limit_s), others_failed=others_failed)
        if quiet < self._limit_s:
            now = self._table.clock()
            if now - self._warned_at <= self._limit_s / 3:
                return
            self._warned_at = now
            for worker in blocking or running:
                logger.warning(
                    "no progress for %.0f s (limit %.0f s): %s",
                    quiet,
                    self._limit_s,
                    hang.describe_rank(reports[worker]),
                )
            return
        if not blocking and any(report.stack is None for report in reports.values()):
            return  # the silent rank will answer, or will soon have been silent for long enough
        if not blocking and leaving:
            return  # they were interrupted a moment ago
        if not blocking:
            stories = "; ".join(hang.describe_rank(report) for report in reports.values())
            for worker in self._workers:
                why = f"no progress for {quiet:.0f} s, and no rank blocks the others: {stories}"
                self._table.kill(worker, "hang", why)
            return
        for worker in blocking:
            story = hang.describe_rank(reports[worker])
            logger.warning("no progress for %.0f s: killing %s", quiet, story)
            answer = self._stacks.get(worker)
            hung_at = None if answer is None else (answer.phase, answer.batch)
            self._table.kill(worker, "hang", story, hung_at=hung_at)
