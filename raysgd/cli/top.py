"""Show the trainers that run on this machine: `raysgd top`. Both.

The files come from processes of this user, and are read with limits all the same: their content cannot run code, fill the
memory, or control the terminal.
"""

from __future__ import annotations

import json
import math
import os
import stat
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["read", "table"]

BYTES_AT_MOST, FILES_AT_MOST = 1 << 14, 100
LONGEST, ABANDONED_S = 40, 60.0
COLUMNS = (
    "PID",
    "TRAINER",
    "STATE",
    "WORKERS",
    "EPOCH",
    "BATCH",
    "SAMPLES/S",
    "DATA",
    "COMPUTE",
    "COMM",
    "RECOVERIES",
    "AGE",
)
PARTS = ("data", "compute", "communication")

Status = Mapping[str, Any]


def read(folder: Path) -> list[Status]:
    """Return what the trainers have published, the oldest trainer first. Remove the files of processes that have ended."""
    if not folder.is_dir() or folder.is_symlink() or folder.lstat().st_uid != os.getuid():
        return []
    found = []
    for path in sorted(folder.glob("*.json"))[:FILES_AT_MOST]:
        status = _read_file(path)
        if status is None:
            continue
        if _is_alive(int(_number(status, "pid"))):
            found.append(status)
        # The processes of another container are not seen from here.
        elif time.time() - _number(status, "updated") > ABANDONED_S:
            path.unlink(missing_ok=True)
    return sorted(found, key=lambda status: _number(status, "started"))


def _read_file(path: Path) -> Status | None:
    """Return the object in a file; None if it is not one, or the file is not an ordinary one of this user."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:  # the trainer has ended meanwhile, or it is a link
        return None
    try:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.getuid():
            return None
        data = os.read(descriptor, BYTES_AT_MOST + 1)
    finally:
        os.close(descriptor)
    try:
        value = json.loads(data) if len(data) <= BYTES_AT_MOST else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (OSError, OverflowError):
        return False
    return pid > 0


def _number(status: Status, name: str) -> float:
    """Return a number of the file, 0 if it has none of this name, or one that is none."""
    value = status.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > 1e15 or not math.isfinite(value):
        return 0.0
    return float(value)


def _text(value: Any) -> str:
    """Return a text of the file without characters that a terminal could obey, or that change the direction of the text."""
    text = value if isinstance(value, str) else ""
    return "".join(each if unicodedata.category(each)[0] != "C" else "?" for each in text[:LONGEST])


def table(statuses: Sequence[Status], now: float) -> Iterator[str]:
    """Yield the lines: a table with a row for each trainer, and below it what does not fit in a column."""
    if not statuses:
        yield "no trainer of this user is running on this machine"
        return
    rows = [COLUMNS, *(_row(status, now) for status in statuses)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = ("PID", "EPOCH", "BATCH", "SAMPLES/S", "DATA", "COMPUTE", "COMM", "RECOVERIES", "AGE")
    align: list[Callable[[str, int], str]] = [str.rjust if name in right else str.ljust for name in COLUMNS]
    for row in rows:
        yield "  ".join(each(cell, width) for each, cell, width in zip(align, row, widths, strict=True)).rstrip()
    for status in statuses:
        yield from (f"{_number(status, 'pid'):.0f}: {note}" for note in _notes(status))


def _row(status: Status, now: float) -> tuple[str, ...]:
    seconds = [_number(status, f"{part}_seconds") for part in PARTS]
    total = sum(seconds)
    shares = [
        f"{each / total:.0%}" if total and f"{part}_seconds" in status else "-"
        for part, each in zip(PARTS, seconds, strict=True)
    ]
    batches = _number(status, "batches")
    return (
        f"{_number(status, 'pid'):.0f}",
        f"{_text(status.get('trainer'))}({_text(status.get('name'))})",
        _text(status.get("state")),
        f"{_number(status, 'workers'):.0f}/{_number(status, 'wanted'):.0f}",
        f"{_number(status, 'epoch'):.0f}",
        f"{_number(status, 'batch'):.0f}" + (f"/{batches:.0f}" if batches else ""),
        f"{_number(status, 'samples_per_second'):,.0f}" if "samples_per_second" in status else "-",
        *shares,
        f"{_number(status, 'recoveries'):.0f}",
        f"{max(now - _number(status, 'updated'), 0.0):.0f} s",
    )


def _notes(status: Status) -> Iterator[str]:
    processes, machines = status.get("processes"), dict[str, list[str]]()
    for each in processes if isinstance(processes, list) else ():
        if isinstance(each, list) and len(each) == 3:
            rank, pid = (_number({"it": value}, "it") for value in each[::2])
            machines.setdefault(_text(each[1]), []).append(f"rank {rank:.0f} is process {pid:.0f}")
    for machine, ranks in machines.items():
        yield f"on {machine}, {', '.join(ranks)}"
    metrics = status.get("metrics")
    if isinstance(metrics, dict) and metrics:
        yield ", ".join(f"{_text(name)} {_number(metrics, name):.4g}" for name in list(metrics)[:6])
    for name, label in (("waits_for", "waits for"), ("last_recovery", "last recovery:"), ("last_error", "last error:")):
        if status.get(name):
            yield f"{label} {_text(status[name])}"
