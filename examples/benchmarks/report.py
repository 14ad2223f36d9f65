"""How every benchmark here reports: one JSON document on stdout, the same as a short table on stderr.

The JSON says on which machine and with which versions it was measured; a figure without them means nothing.
"""

import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

PACKAGES = ("raysgd", "ray", "torch", "lightning", "accelerate")


def machine() -> dict[str, Any]:
    """The machine, its load when the benchmark ended, and the versions of what was measured."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load": [round(each, 2) for each in os.getloadavg()],
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
    }


def spread(values: Sequence[float], digits: int = 4) -> dict[str, Any]:
    """Median, smallest and largest, and how many there were."""
    ordered = sorted(values)
    if not ordered:
        return {"median": None, "least": None, "most": None, "count": 0}
    return {
        "median": round(statistics.median(ordered), digits),
        "least": round(ordered[0], digits),
        "most": round(ordered[-1], digits),
        "count": len(ordered),
    }


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Rows as aligned text, for people."""
    cells = [[*columns], *([_short(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[number]) for line in cells) for number in range(len(columns))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def claim_stdout() -> TextIO:
    """Stdout for the document alone: from here on, what anybody else prints there goes to stderr."""
    sys.stdout.flush()
    own = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return own


def emit(
    out: TextIO,
    benchmark: str,
    settings: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[str],
) -> dict[str, Any]:
    """Prints the document and the table; returns the document."""
    document = {
        "benchmark": benchmark,
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "settings": dict(settings),
        "machine": machine(),
        "columns": list(dict.fromkeys([*columns, "note"])),
        "rows": [dict(row) for row in rows],
    }
    print(table(rows, columns), file=sys.stderr)
    print(written(document), file=out, flush=True)
    return document


def written(document: Mapping[str, Any]) -> str:
    """As JSON, with a line for each row."""
    head, rows = {key: value for key, value in document.items() if key != "rows"}, document["rows"]
    lines = ",\n  ".join(json.dumps(row, default=str) for row in rows)
    return json.dumps(head, indent=1, default=str).removesuffix("\n}") + f',\n "rows": [\n  {lines}\n ]\n}}'


def _short(value: Any) -> str:
    if isinstance(value, Mapping) and "median" in value:
        value = value["median"]
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
