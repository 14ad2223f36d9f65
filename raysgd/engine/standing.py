"""Whether a generation stands, and how the first one comes to."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from raysgd.config import Limits
from raysgd.engine.generation import Generation
from raysgd.engine.worker_table import WorkerTable
from raysgd.errors import ResourceError, WorkerStartError
from raysgd.protocols import Backend
from raysgd.rendezvous import Seat

__all__ = ["Standing"]

logger = logging.getLogger("raysgd")

ATTEMPTS = 3
QUIET_S = 2.0
SLOW_S = 15.0


class Standing:
    """Owns the user's packed factory and hook, and the flag. Forms generations; does not decide of whom. `least` is how
    many may begin, where that is fewer than all."""

    def __init__(
        self, table: WorkerTable, backend: Backend, limits: Limits, factory: Any, hook: Any, least: int | None = None
    ) -> None:
        self._table, self._limits = table, limits
        self._least = table.target if least is None else least
        self._factory, self._hook = factory, hook
        self.former = Generation(table, backend, limits)
        self.up = False

    def form(self, workers: Sequence[str], *, state: Any = None) -> bool:
        """One try to stand a generation of exactly these. Raises the user's own error, if set-up has one."""
        self.up = False
        self.up = self.former.form(workers, hook=self._hook, factory=self._factory, state=state)
        return self.up

    def warm(self) -> dict[str, Any]:
        """What a recruit needs to get ready beside a running group: a generation of its own."""
        return {"hook": self._hook, "factory": self._factory, "seat": Seat(solo=True), "settings": {}}

    def start(self) -> None:
        """Launches the first workers and sets them up."""
        for attempt in range(1, ATTEMPTS + 1):
            room = self._table.group.room()
            count = max(self._least, min(self._table.target, room))
            lacking = count - room
            workers = self._table.launch(count)
            if self._arrive(workers, lacking) and self.form(workers):
                return
            causes = [self._table.lost(m).cause for m in self._table.fallen() if m.worker in workers]
            logger.warning("a worker died during start-up (attempt %d of %d): %s", attempt, ATTEMPTS, "; ".join(causes))
            for worker in workers:
                self._table.dismiss(worker)
        raise WorkerStartError(
            f"workers died {ATTEMPTS} times during start-up, before or in `setup` ({'; '.join(causes)}); "
            "their last words are in Ray's logs (out of memory, or a crash in native code?)"
        )

    def _arrive(self, workers: Sequence[str], lacking: int) -> bool:
        """Waits for launched processes to come up; says what for; gives up after the stated limit."""
        started = self._table.clock()
        said = False
        while missing := [w for w in workers if not self._table.members[w].arrived]:
            self._table.pump(0.2)
            if any(self._table.members[w].gone is not None for w in workers):
                return False
            waited = self._table.clock() - started
            if waited > self._limits.start_s:
                for worker in workers:
                    self._table.dismiss(worker)
                raise ResourceError(self.shortage(len(missing)))
            if lacking > 0:
                said = said or self.say_waiting(len(missing), waited)
            elif waited > SLOW_S and not said:
                said = True
                logger.warning("%d worker process(es) are still starting after %.0f s", len(missing), waited)
        return True

    def say_waiting(self, missing: int, waited: float) -> bool:
        """A start that takes long says what it waits for, once."""
        if waited < QUIET_S:
            return False
        wanting = self._table.group.wanting(missing)
        logger.warning("%d worker(s) wait for %s, at most %.0f s", missing, wanting, self._limits.start_s)
        return True

    def shortage(self, missing: int) -> str:
        group = self._table.group
        return (
            f"{missing} of {self._table.target} workers found no place within {self._limits.start_s:g} s: they need "
            f"{group.wanting(missing)}, and the whole cluster can hold {group.holds_at_most()} such worker(s). "
            "Ask for fewer workers or smaller ones (num_workers, num_cpus_per_worker, resources_per_worker), add nodes, "
            "or, on one machine, start Ray yourself with more logical CPUs: ray.init(num_cpus=...)"
        )
