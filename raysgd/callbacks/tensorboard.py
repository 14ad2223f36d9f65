"""Results as TensorBoard's curves. Its event files are written directly: that takes neither torch nor TensorFlow."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from raysgd.callbacks.base import Callback, Result, Run
from raysgd.callbacks.extra import needs
from raysgd.callbacks.figures import numbers
from raysgd.callbacks.folder import chosen_worker

__all__ = ["TensorBoardCallback"]

WHO = "TensorBoardCallback"


class TensorBoardCallback(Callback):
    """Writes an event file that `tensorboard --logdir` shows: each number as `train/...` or `validate/...` over the
    batches trained so far; what a training function reports under its own names, over its reports, of one rank.

    Owns the open file.
    """

    def __init__(self, logdir: str | Path | None = None, worker_to_log: int = 0) -> None:
        self._given = None if logdir is None else Path(logdir).expanduser()
        self._worker = chosen_worker(worker_to_log)
        self._events: _EventFile | None = None
        self.folder = self._given

    def on_start(self, run: Run) -> None:
        self.on_end(False)
        self.folder = self._given or run.folder
        self._events = _EventFile(self.folder)

    def on_result(self, result: Result) -> None:
        if self._events is None:
            return
        own: dict[str, Any] = {"world_size": result.world_size, "seconds": result.seconds}
        if result.kind == "report":
            values = numbers(result.by_worker[self._worker]) if self._worker < len(result.by_worker) else {}
            tagged = {name: value for name, value in values.items() if not name.startswith("_")}
        else:
            values = {**numbers(result.metrics), **own}
            tagged = {f"{result.kind}/{name}": value for name, value in values.items()}
        self._events.add(tagged, result.step)

    def on_end(self, failed: bool) -> None:
        events, self._events = self._events, None
        if events is not None:
            events.close()


class _EventFile:
    """Owns one event file. Complete after each `add`."""

    numbers = itertools.count()

    def __init__(self, folder: Path) -> None:
        self._event = needs("tensorboard.compat.proto.event_pb2", who=WHO).Event
        self._summary = needs("tensorboard.compat.proto.summary_pb2", who=WHO).Summary
        writer = needs("tensorboard.summary.writer.record_writer", who=WHO).RecordWriter
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard recognises the name; several trainers of one process, in one second, each have their own.
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.{next(self.numbers)}"
        self._file: BinaryIO = open(folder / name, "xb")  # noqa: SIM115  (close closes it)
        self._records = writer(self._file)
        self._write(file_version="brain.Event:2")

    def add(self, values: Mapping[str, float], step: int) -> None:
        shown = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=self._summary(value=shown))

    def close(self) -> None:
        self._file.close()

    def _write(self, **content: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())
        self._file.flush()
