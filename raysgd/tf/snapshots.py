"""When a snapshot is due, and how it leaves the worker: a copy at a batch border, sent by a thread of its own."""

from __future__ import annotations

import threading
import time
from typing import Any, Protocol

from raysgd.core.messages import SnapshotUpload
from raysgd.core.progress import Control, Progress
from raysgd.tf import states

__all__ = ["Snapshotter"]


class _Source(Protocol):
    """What is asked of the replica."""

    _position: Any
    _rank_info: Any

    def full_state(self) -> dict[str, Any]: ...

    def partial(self) -> dict[str, Any]: ...

    @property
    def progress(self) -> Progress: ...


class Snapshotter:
    """Owns at most one upload at a time. Only rank 0 of a group sends; a replica nobody watches sends nothing."""

    def __init__(self, every: Any, control: Control) -> None:
        self._every, self._control = every, control
        self._thread: threading.Thread | None = None
        self._due_at = time.monotonic() + every if isinstance(every, float) else 0.0

    def call_ended(self, replica: _Source) -> None:
        if self._every is not None:
            self.take(replica)

    def batch_done(self, replica: _Source) -> None:
        every = self._every
        if every is None or every == "epoch":
            return
        if isinstance(every, int):
            if replica._position.step % every == 0:
                self.take(replica)
        elif time.monotonic() >= self._due_at:
            self._due_at = time.monotonic() + every
            self.take(replica)

    def take(self, replica: _Source) -> None:
        """Copies the state (training waits for that copy, and for nothing else) and sends it from a thread."""
        upload = self._control.upload
        if upload is None or self._every is None or replica._rank_info.world_rank != 0:
            return
        self.close(limit_s=None)  # the newest one matters: it must not be skipped because an older one is on its way
        state = replica.full_state()
        partial = dict(replica.partial())
        samples = partial.get("num_samples")
        if isinstance(samples, (int, float)):
            partial["num_samples"] = samples * replica._rank_info.world_size
        message = SnapshotUpload(replica.progress, replica._position.call, partial)
        self._thread = threading.Thread(
            target=lambda: upload(message, states.dump(state)), name="raysgd-snapshot", daemon=True
        )
        self._thread.start()

    def close(self, limit_s: float | None = 5) -> None:
        if self._thread is not None:
            self._thread.join(timeout=limit_s)
