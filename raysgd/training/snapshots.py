"""Decides when a snapshot is due, and uploads it. Worker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from raysgd.core.messages import SnapshotUpload
from raysgd.core.progress import Control

__all__ = ["LOADED_S", "Snapshotter"]

# For the snapshot of a state that the user has loaded; a hang in the driver's eyes must take longer.
LOADED_S = 5.0


class Snapshotter:
    """Owns the interval (`ElasticConfig.snapshot_every`) and at most one upload, which runs in a thread of its own."""

    def __init__(self, every: Any, control: Control) -> None:
        self._every, self._control = every, control
        self._thread: threading.Thread | None = None
        self._mark = 0
        self._due_at = time.monotonic() + every if isinstance(every, float) else 0.0

    @property
    def wanted(self) -> bool:
        """Return whether snapshots are to be taken, and there is a driver that receives them."""
        return self._every is not None and self._control.upload is not None

    def due_after_batch(self, step: int) -> bool:
        """Return whether a snapshot is due, now that `step` batches are committed."""
        every = self._every
        if every is None or every == "epoch":
            return False
        if isinstance(every, int):
            before, self._mark = self._mark, step // every
            return self._mark > before  # batches that share a step are committed together
        if time.monotonic() < self._due_at:
            return False
        self._due_at = time.monotonic() + every
        return True

    def wait(self, limit_s: float | None = None) -> None:
        """Wait until the previous upload has ended. The newest snapshot must not be skipped because of an older one."""
        if self._thread is not None:
            self._thread.join(limit_s)

    def send(self, message: SnapshotUpload, dump: Callable[[], Any]) -> None:
        """Upload what `dump` returns. It runs in the thread of the upload, so its state must be a copy."""
        upload = self._control.upload
        assert upload is not None, "only after `wanted`"
        self._thread = threading.Thread(target=lambda: upload(message, dump()), name="raysgd-snapshot", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join(timeout=5)
