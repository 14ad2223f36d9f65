"""When a snapshot is due, and how it leaves the worker: a copy at a batch border, sent by a thread of its own."""

from __future__ import annotations

import copy
import logging
import threading
import time
from typing import Any, Protocol

import torch

from raysgd.core.messages import SnapshotUpload
from raysgd.core.progress import Control, Progress
from raysgd.torch.checkpoint import states

__all__ = ["Snapshotter", "copied", "settled"]

logger = logging.getLogger(__name__)


class _Source(Protocol):
    """What is asked of the replica."""

    _position: Any
    _rank_info: Any

    @property
    def in_shards(self) -> bool: ...

    def full_state(self) -> dict[str, Any]: ...

    def partial(self) -> dict[str, Any]: ...

    @property
    def progress(self) -> Progress: ...


class Snapshotter:
    """Owns at most one upload at a time. Only rank 0 of a group sends; a replica nobody watches sends nothing."""

    def __init__(self, every: Any, control: Control) -> None:
        self._every, self._control = every, control
        self._thread: threading.Thread | None = None
        self._mark = 0
        self._due_at = time.monotonic() + every if isinstance(every, float) else 0.0

    def call_ended(self, replica: _Source) -> None:
        if self._every is not None:
            self.take(replica)

    def batch_done(self, replica: _Source) -> None:
        every = self._every
        if every is None or every == "epoch":
            return
        if isinstance(every, int):
            if replica._position.step // every > self._mark:  # batches that share a step are done together
                self.take(replica)
            self._mark = replica._position.step // every
        elif time.monotonic() >= self._due_at:
            self._due_at = time.monotonic() + every
            self.take(replica)

    def take(self, replica: _Source) -> None:
        """Copies the state (training waits for that copy, and for nothing else) and sends it from a thread."""
        upload = self._control.upload
        if upload is None or self._every is None:
            return
        if replica._rank_info.world_rank != 0:
            if replica.in_shards:
                replica.full_state()  # rank 0 needs everybody's shards
            return
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()  # the newest one matters: it must not be skipped because an older one is still on its way
        state = settled(replica.full_state(), in_shards=replica.in_shards)
        partial = dict(replica.partial())
        samples = partial.get("num_samples")
        if isinstance(samples, (int, float)):
            partial["num_samples"] = samples * replica._rank_info.world_size
        message = SnapshotUpload(replica.progress, replica._position.call, partial)
        self._thread = threading.Thread(
            target=lambda: upload(message, states.dump(state)), name="raysgd-snapshot", daemon=True
        )
        self._thread.start()

    def send(self, sink: Any, state: dict[str, Any], *, in_shards: bool) -> None:
        """A save in the background: training waits for one copy in memory. The connection comes first, so that the
        driver hears of this process's end at any time from here on."""
        stream = sink.connect()
        try:
            kept = settled(state, in_shards=in_shards)
        except BaseException as error:
            stream.give_up(error)
            raise

        def write() -> None:
            try:
                stream.send(lambda file: states.write(kept, file))
            except Exception:
                logger.warning("a save in the background failed", exc_info=True)  # the driver has been told

        threading.Thread(target=write, name="raysgd-save", daemon=True).start()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join(timeout=5)


def settled(state: dict[str, Any], *, in_shards: bool) -> dict[str, Any]:
    """A replica's state that training does not change from here on. What was put together of shards is a copy already."""
    own = {"models", "optimizers"} if in_shards else set()
    return {name: value if name in own else copied(value) for name, value in state.items()}


def copied(value: Any) -> Any:
    """Tensors cloned to the CPU, everything else deep-copied: what training changes from here on does not show."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copied(each) for each in value)
    return copy.deepcopy(value)
