"""Keep the newest committed state on the driver, in case no worker survives. Driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from raysgd.core.measures.metrics import Measured
from raysgd.core.measures.progress import Progress
from raysgd.core.protocols import Call

Ask = Callable[[Call], "list[Any] | None"]  # make a call on all ranks, and return their values; None: one has failed


@dataclass(frozen=True)
class Snapshot:
    """One replica's full state as bytes, and its progress when the snapshot was taken. Where no
    worker has the whole state, and when one was loaded and has not arrived here yet, it is in a
    checkpoint instead: `load(ask)` lets all ranks of a new generation load it, and returns False if
    one has failed.

    `call` is the number of the call that was running, and `partial` that call's partial result over
    all ranks. Without data, training starts from the beginning.
    """

    data: Any = b""
    progress: Progress = field(default_factory=Progress)
    call: int = -1
    partial: Measured | None = None
    load: Callable[[Ask], bool] | None = None


def newest_state(progress: Mapping[str, Progress], snapshot: Snapshot | None = None) -> str | None:
    """Choose whose state all continue with after a failure: that of the worker which has committed
    most (of equal ones, the first), or None for that of the snapshot, if it has as much."""
    best = max(progress, key=lambda worker: progress[worker].order, default=None)
    if best is not None and snapshot is not None and progress[best].order <= snapshot.progress.order:
        return None
    return best


class SnapshotStore:
    """Owns the newest snapshot, and how many loads of the user it must contain."""

    def __init__(self) -> None:
        self._latest: Snapshot | None = None
        self._least_loads = 0

    def offer(self, snapshot: Snapshot) -> None:
        """Keep this snapshot, unless there is a newer one: an upload can be late."""
        if snapshot.progress.loads < self._least_loads:
            return
        if self._latest is None or self._latest.progress.order <= snapshot.progress.order:
            self._latest = snapshot

    def latest(self) -> Snapshot | None:
        return self._latest

    def forget(self) -> None:
        """Drop the snapshot, because the user has changed the state."""
        self._latest, self._least_loads = None, 0

    def require(self, loads: int) -> None:
        """Drop a snapshot of fewer loads, because the user has loaded another state, and refuse
        such ones from now on: one may still be on its way."""
        self._least_loads = loads
        if self._latest is not None and self._latest.progress.loads < loads:
            self._latest = None

    def take_back(self, snapshot: Snapshot | None, loads: int) -> None:
        """Keep an earlier snapshot instead of one of a load that has failed."""
        if self._latest is not None and self._latest.progress.loads >= loads:
            self._latest = snapshot
