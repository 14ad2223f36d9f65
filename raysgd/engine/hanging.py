"""Noticing that nothing moves: first a warning with names and stacks, then the end of the culprit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from raysgd.core.messages import StackReport, StackRequest
from raysgd.engine.crew import SILENT_S, Crew
from raysgd.hang import Report, culprits, describe

__all__ = ["HangGuard"]

logger = logging.getLogger("raysgd")


class HangGuard:
    """Watches one running call. Asks for stacks, blames, kills; `on_deadlock` when there is nobody to blame."""

    def __init__(self, crew: Crew, limit_s: float, on_deadlock: Callable[[str], None]) -> None:
        self._crew, self._limit_s, self._on_deadlock = crew, limit_s, on_deadlock
        self._asked_at: float | None = None
        self._round = 0
        self._warned_at = 0.0
        self._stacks: dict[str, StackReport] = {}

    def tick(self, running: Sequence[str], *, others_fell: bool = False) -> None:
        """`others_fell`: ranks that waited for these gave up already."""
        now = self._crew.clock()
        self._collect()
        quiet = self._quiet(running, now)
        if self._asked_at is None:
            late = quiet >= self._limit_s
            if late or (quiet >= self._limit_s / 10 and now - self._warned_at > self._limit_s / 3):
                self._ask(running)
            return
        if quiet < self._limit_s / 10:
            self._asked_at = None  # it moved again
        elif all(worker in self._stacks or self._frozen(worker) for worker in running):
            self._judge(running, quiet, others_fell)
            self._asked_at, self._warned_at = None, now

    def _quiet(self, running: Sequence[str], now: float) -> float:
        """Seconds since anybody moved; a process that does not answer at all counts alone, however busy the others."""
        still = {worker: now - self._crew.members[worker].moved_at for worker in running}
        frozen = [still[worker] for worker in running if self._frozen(worker)]
        return max(frozen) if frozen else min(still.values(), default=0.0)

    def _frozen(self, worker: str) -> bool:
        return self._crew.group.silent_for(worker) > SILENT_S

    def _ask(self, running: Sequence[str]) -> None:
        self._round = next(self._crew.rounds)
        self._stacks = {}
        self._asked_at = self._crew.clock()
        for worker in running:
            self._crew.group.tell(worker, StackRequest(self._round))

    def _collect(self) -> None:
        for worker, answer in self._crew.take_answers(StackReport):
            if answer.round == self._round:
                self._stacks[worker] = answer

    def _judge(self, running: Sequence[str], quiet: float, others_fell: bool) -> None:
        reports = {}
        for worker in running:
            member, said = self._crew.members[worker], self._stacks.get(worker)
            reports[worker] = Report(
                rank=member.rank or 0,
                node=member.node[:8],
                phase=said.phase if said else member.progress.phase,
                batch=said.batch if said else member.progress.batches,
                stack=said.frames if said else None,
                silent_s=self._crew.group.silent_for(worker),
            )
        guilty = culprits(reports, still_s=min(quiet, self._limit_s), others_fell=others_fell)
        if quiet < self._limit_s:
            for worker in guilty or running:
                logger.warning(
                    "nothing has moved for %.0f s (limit %.0f s): %s",
                    quiet,
                    self._limit_s,
                    describe(reports[worker]),
                )
            return
        if not guilty and any(report.stack is None for report in reports.values()):
            return  # it will answer, or have been silent for long enough
        if not guilty:
            stories = "; ".join(describe(report) for report in reports.values())
            self._on_deadlock(f"nothing moved for {quiet:.0f} s and nobody can be blamed: {stories}")
            return
        for worker in guilty:
            story = describe(reports[worker])
            logger.warning("nothing has moved for %.0f s: ending %s", quiet, story)
            self._crew.kill(worker, "hang", story)
