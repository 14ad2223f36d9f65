"""Record each change of the workers, for `trainer.recoveries`, the log and the limit on failures.
Driver."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from raysgd.core.policy import PHASES, Recovery
from raysgd.errors import counted, ranked

logger = logging.getLogger("raysgd")

PLANNED = ("growth", "shrink", "preemption", "restart", "batch")


class RecoveryLog:
    """Owns the list of recoveries. A reason in PLANNED is a planned change, which does not count as
    a failure. `on_wait` is called with what a recovery waits for."""

    def __init__(
        self, on_recovery: Callable[[Recovery], None], on_wait: Callable[[str], None] = lambda what: None
    ) -> None:
        self.recoveries: list[Recovery] = []
        self._on_recovery, self.on_wait = on_recovery, on_wait

    def failures_since(self, count: int) -> int:
        """Return how many failures there were after the first `count` recoveries."""
        return sum(recovery.reason not in PLANNED for recovery in self.recoveries[count:])

    def record(self, recovery: Recovery, *, continues: bool = True) -> None:
        """Add a recovery to the list, and report it. With `continues` the call continues, otherwise
        an error ends it."""
        phases = {name: round(recovery.phases.get(name, 0.0), 4) for name in PHASES}
        recovery = replace(recovery, time=time.time(), phases={name: took for name, took in phases.items() if took > 0})
        self.recoveries.append(recovery)
        before, after = recovery.world_size_before, recovery.world_size_after
        if continues:
            change = ""
            if recovery.reason in ("preemption", "shrink"):
                change = f"{ranked(recovery.removed_ranks)} left, "
            elif recovery.reason == "growth":
                change = f"{counted(after - before, 'new worker')} joined, "
            logger.warning(
                "%s: %straining continues with %s (%d before), %s, %s redone, after %.2f s",
                recovery.reason,
                change,
                counted(after, "worker"),
                before,
                "in place" if recovery.in_place else "from a snapshot",
                counted(recovery.batches_redone, "batch", "batches"),
                recovery.seconds,
            )
        else:
            logger.error(
                "%s: the call ends with an error; %d of %s stay", recovery.reason, after, counted(before, "worker")
            )
        self._on_recovery(recovery)
