"""Write results as JSON: one line per result, or one list as in v1. Driver."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from raysgd.callbacks.base import Callback, CallResult, Run
from raysgd.callbacks.writers import Writer, check_ranks, for_json, row_of
from raysgd.storage import locations

logger = logging.getLogger("raysgd")


class JsonLinesCallback(Writer):
    """Writes one complete line per result, as soon as there is a result, to `path` (by default
    `history.jsonl` in the log folder). Appends to an existing file.

        {"kind": "train", "epoch": 1, "step": 90, "world_size": 2, "seconds": 1.3, "train_loss": 0.43, ...}

    NaN and infinity are written as the texts "NaN", "Infinity" and "-Infinity". With `log_every=n`,
    there is also a line of the kind "batch" about every n batches.
    """

    def __init__(self, path: str | Path | None = None, *, log_every: int | None = None) -> None:
        super().__init__(log_every)
        self._user_path = None if path is None else Path(path).expanduser()
        self.path = self._user_path
        self._is_whole = False

    def on_start(self, run: Run) -> None:
        self.path = self._user_path or run.folder / "history.jsonl"
        self._is_whole = False

    def on_result(self, result: CallResult) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self._is_whole:
            _end_last_line(self.path)
        self._is_whole = False  # if writing fails, for example because the disk is full
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(for_json(row_of(result)), allow_nan=False) + "\n")
        self._is_whole = True


def _end_last_line(path: Path) -> None:
    """Complete or remove the last line: its writer may have been killed, or the disk full."""
    written = path.read_bytes() if path.is_file() else b""
    if not written or written.endswith(b"\n"):
        return
    before, newline, last = written.rpartition(b"\n")
    try:
        json.loads(last)
    except ValueError:
        locations.write(path, before + newline)
    else:
        locations.write(path, written + b"\n")


class JsonLoggerCallback(Callback):
    """Writes the file `filename` (by default `results.json`) in the folder `logdir` as v1 did: a
    list with one entry per result, which is a list of the results of the workers in
    `workers_to_log` (None: all). Appends to an existing list. Writes the entire file each time, so
    prefer JsonLinesCallback for long runs."""

    def __init__(
        self,
        logdir: str | Path | None = None,
        filename: str | None = None,
        workers_to_log: int | Iterable[int] | None = 0,
    ) -> None:
        self._folder = None if logdir is None else Path(logdir).expanduser()
        self._name = filename or "results.json"
        self._workers = check_ranks(workers_to_log)
        self._results: list[Any] = []
        self._path: Path | None = None

    @property
    def log_path(self) -> Path | None:
        """The path of the file, or None before the first run."""
        return self._path

    def on_start(self, run: Run) -> None:
        self._path = None  # if reading fails, the file stays as it is
        path = (self._folder or run.folder) / self._name
        self._results, self._path = _read_list(path), path
        self._write()

    def on_result(self, result: CallResult) -> None:
        rows = [row for rank, row in enumerate(result.by_worker) if self._workers is None or rank in self._workers]
        self._results.append(for_json(rows))
        self._write()

    def _write(self) -> None:
        if self._path is not None:
            locations.write(self._path, json.dumps(self._results, allow_nan=False).encode())


def _read_list(path: Path) -> list[Any]:
    """Read the list in a file, if there is one. Keep another file's content under a new name."""
    written = path.read_bytes() if path.is_file() else b""
    try:
        content = for_json(json.loads(written or b"[]"))
    except ValueError:
        content = None
    if isinstance(content, list):
        return content
    new_path = locations.move_aside(path)
    logger.warning(
        "%s is not a list in JSON. It is kept as %s, and a new list begins. Take from there what you need",
        path,
        new_path,
    )
    return []
