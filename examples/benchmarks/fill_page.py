"""Puts the tables of the measured results into docs/benchmarks.md.

    python examples/benchmarks/throughput.py > examples/benchmarks/results/throughput.json
    python examples/benchmarks/fill_page.py

A table goes between the lines `<!-- table: throughput -->` and `<!-- end -->`; the rest of the page is left
as it is.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "benchmarks.md"
RESULTS = HERE / "results"
COLUMNS = {
    "throughput": (
        "workload",
        "contender",
        "workers",
        "us_per_step",
        "ratio",
        "cpu_us_per_step",
        "cpu_ratio",
    ),
    "startup": ("contender", "first_epoch_s", "exit_s", "ratio"),
    "recovery": ("case", "gap_s", "batches_redone", "lost", "doubled"),
    "chaos": (
        "faults",
        "faults_by_kind",
        "recoveries_by_reason",
        "lost",
        "doubled",
        "longest_gap_s",
        "goodput",
        "faults_per_10s",
        "left_behind",
    ),
}
PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def cell(value: Any) -> str:
    """One figure. A spread as its median, with least and most where they differ."""
    if value is None:
        return ""
    if isinstance(value, Mapping) and "median" in value:
        median, least, most = (value[name] for name in ("median", "least", "most"))
        return f"{median:g}" if least == most else f"{median:g} ({least:g} to {most:g})"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {count}" for name, count in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


def markdown(document: Mapping[str, Any]) -> str:
    columns = COLUMNS[document["benchmark"]]
    rows = document["rows"]
    if len(rows) == 1:  # one long row reads better downwards
        lines = [("figure", ""), *((name, cell(rows[0].get(name))) for name in columns)]
    else:
        lines = [columns, *(tuple(cell(row.get(name)) for name in columns) for row in rows)]
    head, *body = (f"| {' | '.join(line)} |" for line in lines)
    machine = document["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    told = (
        f"`{document['command']}` on {machine['cores']} cores ({machine['cpu']}), "
        f"Python {machine['python']}, {versions}; load average at the end {machine['load'][0]}. "
        "Spreads are median (least to most) over the rounds."
    )
    return "\n".join([head, "|" + "---|" * len(lines[0]), *body, "", told, ""])


def filled(page: str, documents: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with every table whose result is there."""

    def table(place: re.Match[str]) -> str:
        document = documents.get(place[2])
        return f"{place[1]}{markdown(document)}{place[3]}" if document else place[0]

    return PLACE.sub(table, page)


def main() -> None:
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))]
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(filled(page, {document["benchmark"]: document for document in found}), encoding="utf-8")


if __name__ == "__main__":
    main()
