"""Measure what a worker's loops of `train` take: for data, and in the exchange of gradients.
Worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from raysgd.core.measures.speed import Sums
from raysgd.replica.steps.feed import Feed

# Of Linux: "<ns that it ran> <ns that it waited for a processor> <turns>".
SCHEDULER = Path("/proc/thread-self/schedstat")
SHOWN = ("num_workers", "pin_memory")


class Pace:
    """Owns the sums of this worker, since it joined its generation.

    wait_s, exchanges  the seconds in which steps have waited for the other ranks' gradients, and
                       how many were measured: none where that is not possible
    newest             returns the seconds of the newest step, where some are measured by others
    """

    def __init__(self) -> None:
        self.newest: Callable[[], float] | None = None
        self.reset()

    def reset(self) -> None:
        """Forget everything, because a generation begins."""
        self._before = Sums()
        self._feed: Feed | None = None
        self._began = self._queued = self._judged = 0.0
        self._step = 0
        self.wait_s, self.exchanges = 0.0, 0

    def begin(self, feed: Feed) -> None:
        """Note that a loop begins."""
        self._feed = feed
        self._step, self._began, self._queued = feed.position.step, time.perf_counter(), _queued_s()
        loader = getattr(feed.source, "loader", None)
        shown = ", ".join(f"{name}={getattr(loader, name)}" for name in SHOWN if hasattr(loader, name))
        self._before = self._before._replace(loader=shown or type(loader).__name__)

    def sums(self) -> Sums:
        """Return the sums up to now."""
        feed, before = self._feed, self._before
        if feed is None:
            return before
        batches = feed.position.step - self._step
        seconds = before.seconds + time.perf_counter() - self._began
        if self.newest is not None and (new := before.batches + batches - self.exchanges) > 0:
            self.wait_s += min(self.newest() * new, seconds - self._judged)  # the first ones contain NCCL's start
            self.exchanges, self._judged = self.exchanges + new, seconds
        return Sums(
            before.batches + batches,
            before.parts + feed.parts,
            seconds,
            before.data + feed.waited_s,
            before.hidden + feed.hidden_s,
            self.wait_s + feed.agreed_s if self.exchanges else None,
            before.queued + _queued_s() - self._queued,
            before.loader,
        )

    def end(self) -> None:
        """Note that the loop has ended, if one was running."""
        if self._feed is not None:
            self._before = self.sums()
            self.wait_s += self._feed.agreed_s
            self._feed = None


def _queued_s() -> float:
    """Return for how long this thread has been able to run, and had no processor; 0 if the system
    does not say."""
    with suppress(OSError, ValueError, IndexError):
        return int(SCHEDULER.read_bytes().split()[1]) / 1e9
    return 0.0
