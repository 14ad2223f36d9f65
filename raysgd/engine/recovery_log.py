"""What happened to the membership, for the user, the log and the bound on losses."""

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
    """Owns the list of recoveries. A reason among PLANNED is a change, not a loss."""

    def __init__(
        self,
        on_recovery: Callable[[Recovery], None] = lambda recovery: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.recoveries: list[Recovery] = []
        self._on_recovery, self._clock = on_recovery, clock

    def losses_since(self, mark: int) -> int:
        return sum(recovery.reason not in PLANNED for recovery in self.recoveries[mark:])

    def note(
        self,
        reason: str,
        *,
        lost: tuple[int, ...],
        before: int,
        after: int,
        in_place: bool,
        since: float,
        at: Progress,
        redone: int = 0,
        detail: str = "",
        goes_on: bool = True,
    ) -> None:
        recovery = Recovery(
            reason=reason,
            lost_ranks=lost,
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
        if goes_on:
            _say(recovery)
        else:
            logger.error("%s: the call ends with an error, and %d worker(s) stay (were %d)", reason, after, before)
        self._on_recovery(recovery)


def _say(recovery: Recovery) -> None:
    logger.warning(
        "%s: training goes on with %d worker(s) (were %d), %s, %d batch(es) redone, after %.2f s",
        recovery.reason,
        recovery.world_size_after,
        recovery.world_size_before,
        "in place" if recovery.in_place else "from a snapshot",
        recovery.batches_redone,
        recovery.seconds,
    )
