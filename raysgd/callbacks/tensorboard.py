"""Write TensorBoard event files, without torch or TensorFlow. Driver."""

from __future__ import annotations

import itertools
import os
import socket
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from raysgd.callbacks.base import CallResult, Run
from raysgd.callbacks.writers import Writer, check_rank, import_extra, recovery_scalars, recovery_text, tagged_scalars
from raysgd.core.decisions.policy import Recovery

USER = "TensorBoardCallback"
DT_STRING = 7  # of tensorboard.compat.proto.types_pb2


class TensorBoardCallback(Writer):
    """Writes an event file for `tensorboard --logdir`: each scalar as `train/...` or `validate/...`
    over the batches trained so far, with `log_every=n` also about every n batches as `batch/...`.
    For training functions: the scalars of the rank `worker_to_log`, under their own names, over its
    reports. Each recovery, and each planned change of the workers, is a text `recovery`, and its
    numbers are `recovery/...`.

    Owns the open file.
    """

    def __init__(
        self, logdir: str | Path | None = None, worker_to_log: int = 0, *, log_every: int | None = None
    ) -> None:
        super().__init__(log_every)
        self._user_folder = None if logdir is None else Path(logdir).expanduser()
        self._worker = check_rank(worker_to_log)
        self._events: _EventFile | None = None
        self.folder = self._user_folder

    def on_start(self, run: Run) -> None:
        self.on_end(False)
        self.folder = self._user_folder or run.folder
        self._events = _EventFile(self.folder)

    def on_result(self, result: CallResult) -> None:
        if self._events is not None:
            self._events.add(tagged_scalars(result, self._worker), result.step)

    def on_recovery(self, recovery: Recovery) -> None:
        if self._events is not None:
            values = {f"recovery/{name}": value for name, value in recovery_scalars(recovery).items()}
            detail = textwrap.indent(recovery.detail, "    ")  # TensorBoard shows Markdown, in which this is verbatim
            texts = {"recovery": f"{recovery_text(recovery)}\n\n{detail}".rstrip()}
            self._events.add(values, recovery.step, texts=texts, wall_time=recovery.time or time.time())

    def on_end(self, failed: bool) -> None:
        events, self._events = self._events, None
        if events is not None:
            events.close()


class _EventFile:
    """Owns one event file, which is complete after each `add`."""

    numbers = itertools.count()

    def __init__(self, folder: Path) -> None:
        self._event = import_extra("tensorboard.compat.proto.event_pb2", user=USER).Event
        summaries = import_extra("tensorboard.compat.proto.summary_pb2", user=USER)
        self._summary, self._metadata = summaries.Summary, summaries.SummaryMetadata
        self._tensor = import_extra("tensorboard.compat.proto.tensor_pb2", user=USER).TensorProto
        writer = import_extra("tensorboard.summary.writer.record_writer", user=USER).RecordWriter
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard recognises this name. The count makes it unique to a trainer, also within one second.
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.{next(self.numbers)}"
        self._file: BinaryIO = open(folder / name, "xb")  # noqa: SIM115  (close closes it)
        self._records = writer(self._file)
        self._write(wall_time=time.time(), file_version="brain.Event:2")

    def add(
        self,
        values: Mapping[str, float],
        step: int,
        *,
        texts: Mapping[str, str] | None = None,
        wall_time: float | None = None,
    ) -> None:
        summaries = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        summaries += [self._text(name, text) for name, text in (texts or {}).items()]
        wall_time = time.time() if wall_time is None else wall_time
        self._write(step=step, wall_time=wall_time, summary=self._summary(value=summaries))

    def _text(self, name: str, text: str) -> Any:
        """Make a text as TensorBoard's plugin expects it: a string tensor without dimensions."""
        metadata = self._metadata(plugin_data=self._metadata.PluginData(plugin_name="text"))
        content = text.encode("utf-8", "replace")
        return self._summary.Value(
            tag=name, metadata=metadata, tensor=self._tensor(dtype=DT_STRING, string_val=[content])
        )

    def close(self) -> None:
        self._file.close()

    def _write(self, **content: Any) -> None:
        self._records.write(self._event(**content).SerializeToString())
        self._file.flush()
