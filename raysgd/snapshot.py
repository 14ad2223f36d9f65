"""Committed state, kept by the driver: what fresh processes start from when nobody is left."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from raysgd.progress import Progress

__all__ = ["Snapshot", "SnapshotStore"]


@dataclass(frozen=True)
class Snapshot:
    """One replica's whole state as bytes, and how far it had got when they were taken.

    `call` is the number of the call that was running, `partial` that call's result so far, over all ranks.
    Without data it stands for a start from scratch.
    """

    data: Any = b""
    progress: Progress = field(default_factory=Progress)
    call: int = -1
    partial: dict[str, Any] | None = None


class SnapshotStore:
    """Holds the newest whole snapshot. Filled by the thread that receives uploads, read by the engine."""

    def __init__(self) -> None:
        self._latest: Snapshot | None = None
        self._lock = threading.Lock()

    def offer(self, snapshot: Snapshot) -> bool:
        """Keeps it unless a newer one is there: uploads of an old generation may arrive late."""
        with self._lock:
            if self._latest is not None and self._latest.progress.order > snapshot.progress.order:
                return False
            self._latest = snapshot
            return True

    def latest(self) -> Snapshot | None:
        with self._lock:
            return self._latest

    def forget(self) -> None:
        """The state was replaced by hand (a load): what was kept is not the newest truth any more."""
        with self._lock:
            self._latest = None
