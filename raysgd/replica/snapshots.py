"""Decides when a snapshot is due, and uploads it. Worker."""

from __future__ import annotations

import logging
import pickle
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from raysgd.core.channel.messages import SnapshotUpload
from raysgd.core.control import Control
from raysgd.core.measures.metrics import Measured
from raysgd.errors import described
from raysgd.replica.steps.feed import Feed

logger = logging.getLogger(__name__)

CLOSE_S = 5.0
SMALL = 1 << 20

# A copy of the state. In a `with` block, which another thread enters, it is complete, and packed as these buffers.
Copied = AbstractContextManager[Sequence[Any]]
Measuring = Callable[[], Measured]  # which that thread calls


class Snapshotter:
    """Owns the interval (`ElasticConfig.snapshot_every`), the thread that uploads, and the newest
    snapshot that it has not begun to upload."""

    def __init__(self, every: Any, control: Control) -> None:
        self._every, self._control = every, control
        self.within_epochs = every not in (None, "epoch")
        self._thread: threading.Thread | None = None
        self._requests: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._next: tuple[SnapshotUpload, Measuring, Copied] | None = None
        self._uploading = False
        self._size = 0
        self._warned = self._slow = False
        self._due_at = time.monotonic() + every if isinstance(every, float) else 0.0

    @property
    def wanted(self) -> bool:
        """Whether snapshots are to be taken, and there is a driver that receives them."""
        return self._every is not None and self._control.upload is not None

    def due_after_batch(self, step: int, *, before: int) -> bool:
        """Whether a snapshot is due, now that `step` batches are committed, and not only the
        `before` ones. With a number of batches, that is so on all ranks or on none, whatever each
        has done earlier."""
        every = self._every
        if not self.within_epochs:
            return False
        if isinstance(every, int):
            return step // every > before // every  # batches that share a step are committed together
        if time.monotonic() < self._due_at:
            return False
        self._due_at = time.monotonic() + every
        return True

    def take_if_due(self, replica: Any, feed: Feed, before: int) -> None:
        """Take a snapshot in an epoch, if one is due after the step `before` and those since."""
        if replica.agree_on_snapshot(self.due_after_batch(feed.position.step, before=before)):
            feed.note_end_of_epoch()
            self.take(replica, waits=False)

    def take(self, replica: Any, *, waits: bool = True) -> None:
        """Send a copy of the replica's state to the driver, from rank 0. Training waits for the
        copy, and, if it `waits`, until a large one before it is sent; otherwise, there is none
        meanwhile."""
        replica.share()
        if not (self.wanted and replica.rank == 0 and self.has_room(waits=waits)):
            return
        # Read before a device copies.
        state, measured = replica.full_state(for_peers=True), replica.results.of_all_ranks()
        try:
            copied, size = replica.copy(state)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            self.warn(error)
            return
        self.send(SnapshotUpload(replica.progress, replica.position.call), measured, copied, size)

    def wait(self, limit_s: float | None = None) -> bool:
        """Wait until the newest snapshot is uploaded. Return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._uploading, limit_s)

    def has_room(self, *, waits: bool) -> bool:
        """Whether, before a snapshot is taken, an earlier one is uploaded, if it is so large that
        memory and network should not have to hold both; with `waits`, wait until it is. Of small
        ones, only the newest is uploaded next."""
        if self._size <= SMALL or self.wait(None if waits else 0.0):
            return True
        if not self._slow:
            self._slow = True
            logger.warning(
                "a snapshot in the middle of an epoch was left out, because the one before it (%.0f MB) is still being sent to the "
                "script's machine. Later ones are left out without a message. For this network, set a larger "
                "ElasticConfig(snapshot_every=...)",
                self._size / 1e6,
            )
        return False

    def warn(self, error: Exception) -> None:
        """Log once that the state cannot be packed. Training does not need that as long as a worker
        is left."""
        if not self._warned:
            self._warned = True
            logger.warning(
                "no snapshot can be taken, because the state cannot be pickled (%s). If all workers fail, training continues from an "
                "earlier snapshot, or starts over. Return from state_dict() only what pickle can handle",
                described(error),
            )

    def send(self, message: SnapshotUpload, measured: Measuring, copied: Copied, size: int) -> None:
        """Upload a snapshot on the thread for that, in place of one that has not begun."""
        self._size = size
        with self._changed:
            self._next = (message, measured, copied)
            if not self._uploading:
                self._uploading = True
                self._requests.put(True)
        if self._thread is None:
            self._thread = threading.Thread(target=self._upload, name="raysgd-snapshot", daemon=True)
            self._thread.start()

    def _upload(self) -> None:
        upload = self._control.upload
        assert upload is not None, "only after `wanted`"
        while self._requests.get():
            while (newest := self._take()) is not None:
                message, measured, copied = newest
                try:
                    with copied as buffers:
                        upload(replace(message, partial=measured()), *buffers)
                except Exception as error:
                    logger.warning("a snapshot could not be sent to the driver: %s", described(error))
                del newest, measured, copied

    def _take(self) -> tuple[SnapshotUpload, Measuring, Copied] | None:
        """Take the snapshot to upload next. Without one, the uploads have ended."""
        with self._changed:
            newest, self._next = self._next, None
            self._uploading = newest is not None
            if newest is None:
                self._changed.notify_all()
            return newest

    def close(self) -> None:
        """End the thread, after what it is uploading."""
        if self._thread is not None:
            self._requests.put(False)
            self._thread.join(CLOSE_S)
