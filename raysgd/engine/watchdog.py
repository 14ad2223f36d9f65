"""Detect that a call makes no progress: first log the stacks, then kill the ranks that block the others. Driver."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from raysgd.core.hang import RankReport, blocking_ranks, describe_rank, is_in_collective
from raysgd.core.messages import StackReport
from raysgd.core.progress import longest_silence_s
from raysgd.engine.worker_table import SILENT_S, WorkerTable

logger = logging.getLogger("raysgd")

# For a rank to leave a collective call, after it was interrupted: at least, and as a part of the limit of a hang.
LEAVE_S, LEAVE_PART = 10.0, 0.1


class Watchdog:
    """Watches one running call on `workers`. Owns the stacks that it asked for. Kills the ranks that block the others,
    or all ranks if it cannot tell which ones do, and ranks that do not leave a collective call."""

    def __init__(self, table: WorkerTable, workers: Sequence[str], limit_s: float) -> None:
        self._table, self._workers, self._limit_s = table, workers, limit_s
        self._asked_at: float | None = None
        self._round = 0
        self._warned_at = self._judged_at = 0.0
        self._stacks: dict[str, StackReport] = {}

    def tick(self, running: Sequence[str], *, interrupted_s: float | None = None, has_survivor: bool = False) -> None:
        """Log or kill ranks that have made no progress for too long. All ranks were interrupted `interrupted_s` ago,
        because one has failed; so ranks that waited for the running ones have ended their calls already. With
        `has_survivor`, one of these has the state of the training."""
        now = self._table.clock()
        self._collect()
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
        elif all(worker in self._stacks or self._frozen(worker) for worker in running):
            if not (stuck and self._kill_in_collectives(running, interrupted_s or 0.0)):
                self._judge(running, quiet, others_failed=interrupted_s is not None, leaving=leaving)
            self._asked_at, self._judged_at = None, now

    def _kill_in_collectives(self, running: Sequence[str], interrupted_s: float) -> bool:
        """Kill the ranks that are still in a collective call, which should have failed when they were interrupted. Return
        whether there are any."""
        waiting = [w for w in running if w in self._stacks and is_in_collective(self._stacks[w].frames)]
        for worker in waiting:
            story = describe_rank(self._report(worker))
            why = f"it did not leave a collective call within {interrupted_s:.0f} s after it was interrupted: {story}"
            logger.warning("killing a rank because %s", why)
            self._table.kill(worker, "hang", why)
        return bool(waiting)

    def _quiet(self, running: Sequence[str], now: float) -> float:
        """Return for how many seconds no rank has made progress, at least. If processes do not answer at all, only they
        count. In a large group, a rank that makes progress reports it only now and then."""
        silent = {worker: self._table.group.silent_for(worker) for worker in running}
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

    def _frozen(self, worker: str) -> bool:
        return self._table.group.silent_for(worker) > SILENT_S

    def _ask(self, running: Sequence[str]) -> None:
        self._stacks = {}
        self._asked_at = self._table.clock()
        self._round = self._table.request_stacks(running)

    def _collect(self) -> None:
        self._stacks |= dict(self._table.take_answers(StackReport, self._round))

    def _report(self, worker: str) -> RankReport:
        info, answer = self._table[worker], self._stacks.get(worker)
        return RankReport(
            rank=info.rank or 0,
            node=info.machine,
            phase=answer.phase if answer else info.progress.phase,
            batch=answer.batch if answer else info.progress.batches,
            stack=answer.frames if answer else None,
            silent_s=self._table.group.silent_for(worker),
        )

    def _judge(self, running: Sequence[str], quiet: float, *, others_failed: bool, leaving: bool) -> None:
        reports = {worker: self._report(worker) for worker in running}
        blocking = blocking_ranks(reports, still_s=min(quiet, self._limit_s), others_failed=others_failed)
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
                    describe_rank(reports[worker]),
                )
            return
        if not blocking and any(report.stack is None for report in reports.values()):
            return  # the silent rank will answer, or will soon have been silent for long enough
        if not blocking and leaving:
            return  # they were interrupted a moment ago
        if not blocking:
            stories = "; ".join(describe_rank(report) for report in reports.values())
            for worker in self._workers:
                why = f"no progress for {quiet:.0f} s, and no rank blocks the others: {stories}"
                self._table.kill(worker, "hang", why)
            return
        for worker in blocking:
            story = describe_rank(reports[worker])
            logger.warning("no progress for %.0f s: killing %s", quiet, story)
            answer = self._stacks.get(worker)
            hung_at = None if answer is None else (answer.phase, answer.batch)
            self._table.kill(worker, "hang", story, hung_at=hung_at)
