"""Publish what a trainer does, as a small JSON file that `raysgd top` reads. Driver."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from raysgd.callbacks.base import Callback, CallResult, Run, Underway
from raysgd.core.metrics import SECONDS
from raysgd.core.policy import Recovery
from raysgd.storage.durable import private_folder, private_place

__all__ = ["OFF", "StatusFile", "status_folder"]

logger = logging.getLogger("raysgd")

OFF = "RAYSGD_STATUS"  # the environment variable that switches the files off, with the value 0
EVERY_S = 1.0
STATES = {"train": "training", "validate": "validating", "test": "testing", "report": "running"}
SHOWN_METRICS, SHOWN_WORKERS, LONGEST_TEXT = 6, 100, 100


def status_folder() -> Path:
    """Return the folder of this user's files. Only this user can read or write it."""
    return private_place("status")


class StatusFile(Callback):
    """Owns one file, which exists while the trainer does. Every trainer has one of these.

    The values are kept in memory. The file is written by the thread that calls the trainer, at most once per second, and at
    the end of what took longer: a short call costs two readings of the clock. There is no thread, because a process that
    trains with one worker forks the processes of its DataLoader. A trainer that lives for less than a second writes nothing.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._samples: dict[str, float] = {}
        self._processes: Callable[[], Sequence[tuple[str, int]]] = tuple
        self._began = self._wrote = time.monotonic()
        self._path: Path | None = None
        self._writes = os.environ.get(OFF, "").strip() != "0"

    def on_start(self, run: Run) -> None:
        self._processes = run.processes
        self._values = {
            "pid": os.getpid(),
            "started": time.time(),
            "trainer": run.trainer,
            "name": run.name,
            "state": "idle",
            "workers": run.num_workers,
            "wanted": run.num_workers,
            "recoveries": 0,
        }

    def on_progress(self, now: Underway) -> None:
        values, progress = self._values, now.progress
        if not now.worker:  # the call is announced
            values["state"], self._began = STATES[now.kind], time.monotonic()
            self._samples.clear()
        elif time.monotonic() - self._wrote >= EVERY_S or now.worker not in self._samples:
            values.pop("waits_for", None)
            self._samples[now.worker] = _number(now.metrics.get("num_samples"))
            values |= {"epoch": progress.epoch, "step": progress.step, "batch": progress.batches}
            values["batches"] = progress.expected
            if now.kind == "train":
                self._measured(now.metrics, max(self._samples.values()) * len(self._samples), self._began)
        self._write()

    def on_result(self, result: CallResult) -> None:
        values = self._values
        values |= {"state": "idle", "epoch": result.epoch or 0, "step": result.step, "workers": result.world_size}
        values["wanted"] = max(values.get("wanted", 0), result.world_size)
        if result.kind == "report":
            values["state"] = STATES["report"]
        if result.kind in ("train", "report"):
            self._measured(
                result.metrics, _number(result.metrics.get("num_samples")), time.monotonic() - result.seconds
            )
        self._write(took=result.seconds)

    def on_recovery(self, recovery: Recovery) -> None:
        self._values["recoveries"] = self._values.get("recoveries", 0) + 1
        self._values["workers"] = recovery.world_size_after
        if recovery.reason == "shrink":
            self._values["wanted"] = recovery.world_size_after
        self._values["wanted"] = max(self._values.get("wanted", 0), recovery.world_size_after)
        self._values["last_recovery"] = f"{recovery.reason}, {recovery.seconds:.2f} s"
        self._samples.clear()
        self._write(took=EVERY_S)  # a recovery takes longer than this

    def on_wait(self, what: str) -> None:
        self._values["waits_for"] = what[:LONGEST_TEXT]
        self._write(took=EVERY_S)

    def on_error(self, error: BaseException) -> None:
        self._values |= {"state": "idle", "last_error": type(error).__name__}
        self._write()

    def on_end(self, failed: bool) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it has the files of other trainers
                self._path.parent.rmdir()
            self._path = None

    def _measured(self, metrics: Any, samples: float, began: float) -> None:
        """Note the speed, and the first few metrics that are numbers."""
        if samples:
            self._values["samples_per_second"] = samples / max(time.monotonic() - began, 1e-6)
        for what, name in SECONDS.items():
            if name in metrics:
                self._values[f"{what}_seconds"] = _number(metrics[name])
        own = {n: _number(each) for n, each in metrics.items() if isinstance(each, float) and n not in SECONDS.values()}
        shown = [name for name in own if not name.startswith("last_") and name != "samples_per_second"]
        self._values["metrics"] = {name[:LONGEST_TEXT]: own[name] for name in shown[:SHOWN_METRICS]}

    def _write(self, took: float = 0.0) -> None:
        """Write the file if the last time is a second ago, or what has ended `took` that long."""
        now = time.monotonic()
        if not self._writes or (took < EVERY_S and now - self._wrote < EVERY_S):
            return
        self._wrote = now
        shown = enumerate(self._processes()[:SHOWN_WORKERS])
        processes = [(rank, machine, pid) for rank, (machine, pid) in shown if pid != os.getpid()]
        try:
            folder = private_folder(status_folder())
            path = self._path or folder / f"{os.getpid()}-{uuid.uuid4().hex[:8]}.json"
            draft = path.with_suffix(".draft")
            with open(draft, "w", encoding="ascii", opener=_private) as file:
                json.dump({**self._values, "processes": processes, "updated": time.time()}, file)
            draft.rename(path)
            self._path = path
        except FileNotFoundError as error:  # another trainer has just ended, and removed the folder
            logger.debug("the status was not written: %s", error)
        except OSError as error:
            self._writes = False
            logger.info("`raysgd top` cannot show this trainer: %s", error)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _number(value: Any) -> float:
    """Return a finite number, because JSON has no other ones; 0 for anything else."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0
