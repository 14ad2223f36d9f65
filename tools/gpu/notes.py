"""What the phases see: a line for each measurement, at once, and of all lines a table and a document.

A line of `results.jsonl` has the phase, what was measured (`what`), what was seen (a number, its spread, or words), its
unit, and a note, which says what was emulated. With `detail` it is not in the table.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = ("phase", "what", "seen", "unit", "note")
SHOWN = 100  # characters of a note, as errors can be long


class Notes:
    """The lines of one phase, and the time that it has. `instead` says what it runs on, if not on GPUs."""

    def __init__(self, path: Path, phase: str, seconds: float, *, instead: str = "") -> None:
        self.path, self.phase, self.seconds, self._instead = path, phase, seconds, instead
        self.small = bool(instead)
        self._began = time.monotonic()

    def add(self, what: str, seen: Any, unit: str = "", note: str = "", **others: Any) -> None:
        note = "; ".join(filter(None, [self._instead, note]))
        line = {"phase": self.phase, "what": what, "seen": seen, "unit": unit, "note": note, **others}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**line, "time": round(time.time(), 1)}, default=str) + "\n")

    def left(self) -> float:
        """Return how many seconds of this phase are left."""
        return self.seconds - (time.monotonic() - self._began)


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the lines of these files, of each phase those of the last file that has some; not a line whose process was killed
    while it wrote."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in paths:
        own: dict[str, list[dict[str, Any]]] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            with contextlib.suppress(json.JSONDecodeError):
                read = json.loads(line)
                own.setdefault(read["phase"], []).append(read)
        found |= own
    return [line for lines in found.values() for line in lines]


def spread(values: Sequence[float], digits: int = 4) -> Any:
    return report().spread(values, digits)


def document(lines: Sequence[Mapping[str, Any]], command: Sequence[str]) -> dict[str, Any]:
    """Return the lines in the form of the other benchmarks' results."""
    machine = next((row["machine"] for row in lines if "machine" in row), None) or report().machine()
    shown = [{name: _shown(row[name]) for name in COLUMNS} for row in lines if not row.get("detail")]
    head = {"benchmark": "gpu", "command": shlex.join(command), "settings": {}, "machine": machine}
    return {**head, "columns": list(COLUMNS), "rows": shown}


def table(document: Mapping[str, Any]) -> str:
    return str(report().table(document["rows"], document["columns"]))


def written(document: Mapping[str, Any]) -> str:
    return str(report().written(document))


def first_line(error: object) -> str:
    """Return an error as one short line."""
    text = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else str(error)
    return " ".join(text.split())[:SHOWN]


def report() -> ModuleType:
    """Return how the other benchmarks report. Their folder is no package."""
    name = "raysgd_benchmark_report"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / "benchmarks" / "report.py")
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _shown(value: Any) -> Any:
    """Return a cell without what would end a cell of a page's table."""
    return value.replace("|", "/")[:SHOWN] if isinstance(value, str) else value
