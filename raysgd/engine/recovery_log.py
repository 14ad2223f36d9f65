"""The list behind `trainer.recoveries`: each change of the workers, for the user, the log and the limit on failures. Driver."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from raysgd.elastic import Recovery
from raysgd.progress import Progress

__all__ = ["RecoveryLog"]

logger = logging.getLogger("raysgd")

PLANNED = ("growth", "shrink", "preemption", "restart")


class RecoveryLog:
    """Owns the list of recoveries. A reason in PLANNED is a planned change, not a failure."""

    def __init__(
        self,
        on_recovery: Callable[[Recovery], None] = lambda recovery: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.recoveries: list[Recovery] = []
        self._on_recovery, self._clock = on_recovery, clock

    def failures_since(self, count: int) -> int:
        """Return how many failures there were after the first `count` recoveries."""
        return sum(recovery.reason not in PLANNED for recovery in self.recoveries[count:])

    def record(
        self,
        reason: str,
        *,
        failed_ranks: tuple[int, ...],
        before: int,
        after: int,
        in_place: bool,
        since: float,
        at: Progress,
        redone: int = 0,
        detail: str = "",
        continues: bool = True,
    ) -> None:
        recovery = Recovery(
            reason=reason,
            lost_ranks=failed_ranks,
            world_size_before=before,
            world_size_after=after,
            in_place=in_place,
            batches_redone=redone,
            seconds=round(self._clock() - since, 4),
            epoch=at.epoch,
            batch=at.batches,
            detail=detail,
        )
        self.recoveries.append(recovery)
        if continues:
            _report(recovery)
        else:
            logger.error("%s: the call ends with an error; %d of %d worker(s) stay", reason, after, before)
        self._on_recovery(recovery)


def _report(recovery: Recovery) -> None:
    logger.warning(
        "%s: training continues with %d worker(s) (%d before), %s, %d batch(es) redone, after %.2f s",
        recovery.reason,
        recovery.world_size_after,
        recovery.world_size_before,
        "in place" if recovery.in_place else "from a snapshot",
        recovery.batches_redone,
        recovery.seconds,
    )
