"""Detect that a call makes no progress: first log the stacks, then kill the ranks that block the others. Driver."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from raysgd.core.hang import RankReport, blocking_ranks, describe_rank
from raysgd.core.messages import StackReport
from raysgd.core.progress import longest_silence_s
from raysgd.engine.worker_table import SILENT_S, WorkerTable

__all__ = ["Watchdog"]

logger = logging.getLogger("raysgd")


class Watchdog:
    """Watches one running call on `workers`. Owns the stacks that it asked for. Kills the ranks that block the others,
    or all ranks if it cannot tell which ones do."""

    def __init__(self, table: WorkerTable, workers: Sequence[str], limit_s: float) -> None:
        self._table, self._workers, self._limit_s = table, workers, limit_s
        self._asked_at: float | None = None
        self._round = 0
        self._warned_at = 0.0
        self._stacks: dict[str, StackReport] = {}

    def tick(self, running: Sequence[str], *, others_failed: bool = False) -> None:
        """Log or kill ranks that have made no progress for too long. With `others_failed`, ranks that waited for the
        running ones have failed already."""
        now = self._table.clock()
        self._collect()
        quiet = self._quiet(running, now)
        if self._asked_at is None:
            late = quiet >= self._limit_s
            if late or (quiet >= self._limit_s / 10 and now - self._warned_at > self._limit_s / 3):
                self._ask(running)
            return
        if quiet < self._limit_s / 10:
            self._asked_at = None  # it makes progress again
        elif all(worker in self._stacks or self._frozen(worker) for worker in running):
            self._judge(running, quiet, others_failed)
            self._asked_at, self._warned_at = None, now

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

    def _judge(self, running: Sequence[str], quiet: float, others_failed: bool) -> None:
        reports = {}
        for worker in running:
            info, answer = self._table[worker], self._stacks.get(worker)
            reports[worker] = RankReport(
                rank=info.rank or 0,
                node=info.machine,
                phase=answer.phase if answer else info.progress.phase,
                batch=answer.batch if answer else info.progress.batches,
                stack=answer.frames if answer else None,
                silent_s=self._table.group.silent_for(worker),
            )
        blocking = blocking_ranks(reports, still_s=min(quiet, self._limit_s), others_failed=others_failed)
        if quiet < self._limit_s:
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
        if not blocking:
            stories = "; ".join(describe_rank(report) for report in reports.values())
            for worker in self._workers:
                why = f"no progress for {quiet:.0f} s, and no rank blocks the others: {stories}"
                self._table.kill(worker, "hang", why)
            return
        for worker in blocking:
            story = describe_rank(reports[worker])
            logger.warning("no progress for %.0f s: killing %s", quiet, story)
            self._table.kill(worker, "hang", story)
