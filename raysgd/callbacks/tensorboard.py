"""Write TensorBoard event files, without torch or TensorFlow. Driver."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from raysgd.callbacks.base import Callback, CallResult, Run
from raysgd.callbacks.writers import check_rank, import_extra, tagged_scalars

__all__ = ["TensorBoardCallback"]

USER = "TensorBoardCallback"


class TensorBoardCallback(Callback):
    """Writes an event file for `tensorboard --logdir`: each scalar as `train/...` or `validate/...` over the batches
    trained so far. For training functions: the scalars of one rank, under their own names, over its reports.

    Owns the open file.
    """

    def __init__(self, logdir: str | Path | None = None, worker_to_log: int = 0) -> None:
        self._given = None if logdir is None else Path(logdir).expanduser()
        self._worker = check_rank(worker_to_log)
        self._events: _EventFile | None = None
        self.folder = self._given

    def on_start(self, run: Run) -> None:
        self.on_end(False)
        self.folder = self._given or run.folder
        self._events = _EventFile(self.folder)

    def on_result(self, result: CallResult) -> None:
        if self._events is not None:
            self._events.add(tagged_scalars(result, self._worker), result.step)

    def on_end(self, failed: bool) -> None:
        events, self._events = self._events, None
        if events is not None:
            events.close()


class _EventFile:
    """Owns one event file, which is complete after each `add`."""

    numbers = itertools.count()

    def __init__(self, folder: Path) -> None:
        self._event = import_extra("tensorboard.compat.proto.event_pb2", user=USER).Event
        self._summary = import_extra("tensorboard.compat.proto.summary_pb2", user=USER).Summary
        writer = import_extra("tensorboard.summary.writer.record_writer", user=USER).RecordWriter
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard recognises this name. The count makes it unique to a trainer, also within one second.
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.{next(self.numbers)}"
        self._file: BinaryIO = open(folder / name, "xb")  # noqa: SIM115  (close closes it)
        self._records = writer(self._file)
        self._write(file_version="brain.Event:2")

    def add(self, values: Mapping[str, float], step: int) -> None:
        summaries = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=self._summary(value=summaries))

    def close(self) -> None:
        self._file.close()

    def _write(self, **content: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **content).SerializeToString())
        self._file.flush()
