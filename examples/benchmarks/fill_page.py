"""Puts the tables and pictures of the measured results into docs/benchmarks.md, its tables' page, docs/index.md and README.md.

    python examples/benchmarks/bench.py
    python examples/benchmarks/fill_page.py

Between such a line and `<!-- end -->` goes what it asks for; the rest of the page is left as it is:

    <!-- table: startup -->                         all rows
    <!-- table: throughput workload=tiny -->        these rows, without the column
    <!-- table: throughput workload=tiny told -->   the same, and how it was measured
    <!-- matrix: throughput ratio -->               a figure for each setting and contender
    <!-- plots: kill_curve -->                      its pictures in docs/benchmarks/
    <!-- picture: kill_curve -->                    the light or the dark one, in README.md
    <!-- summary: all -->                           a line for each claim: the best peer, the ratio, rounds, spread
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "benchmarks.md"
OTHER_PAGES = (
    *(
        PAGE.with_name(f"{name}.md")
        for name in ("benchmarks_tables", "scaling", "same_numbers", "unequal_machines", "index")
    ),
    HERE.parents[1] / "README.md",
)
RESULTS = HERE / "results"
PLACE = re.compile(
    r"(<!-- (table|matrix|plots|picture|summary): (\w+)((?: [\w=]+)*) -->\n).*?(<!-- end -->)", re.DOTALL
)
REPEATED = {  # the rows of recovery.py that make the kills of kill_curve.py
    "raysgd": "raysgd, in place",
    "Ray Train v2": "Ray Train v2, elastic",
    "torchrun": "torchrun",
}
Rows = Sequence[Mapping[str, Any]]


def cell(value: Any) -> str:
    """One figure. A spread as its median, with least and most where they differ."""
    if value is None:
        return ""
    if isinstance(value, Mapping) and "median" in value:
        if value["median"] is None:
            return ""
        median, spread = short(value["median"]), " to ".join(bounds(value))
        return median if value["least"] == value["most"] else f"{median} ({spread})"
    return short(value) if isinstance(value, float) else str(value)


def bounds(value: Mapping[str, Any]) -> tuple[str, str]:
    return short(value["least"]), short(value["most"])


def short(figure: float) -> str:
    """Four digits that count; no powers of ten."""
    return f"{figure:.0f}" if abs(figure) >= 1000 else f"{figure:.4g}"


def lines(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *body])


def table(document: Mapping[str, Any], only: Mapping[str, str]) -> str:
    rows = [row for row in document["rows"] if all(str(row.get(name)) == value for name, value in only.items())]
    columns = [name for name in document["columns"] if name not in only and any(cell(row.get(name)) for row in rows)]
    return lines(columns, [[cell(row.get(name)) for name in columns] for row in rows])


def matrix(document: Mapping[str, Any], figure: str) -> str:
    """Medians only: a line for each setting, a column for each contender."""
    settings: dict[tuple[str, ...], dict[str, str]] = {}
    for row in document["rows"]:
        value = row.get(figure)
        value = value["median"] if isinstance(value, Mapping) else value
        setting = tuple(str(row[name]) for name in ("workload", "workers"))
        settings.setdefault(setting, {})[row["contender"]] = cell(value)
    names = list(dict.fromkeys(row["contender"] for row in document["rows"]))
    body = [[*setting, *(own.get(name, "") for name in names)] for setting, own in settings.items()]
    return lines(["workload", "workers", *names], body)


@dataclass(frozen=True)
class Claim:
    """A line of the summary: a figure of raysgd's row, and what it is compared with."""

    text: str
    benchmark: str
    only: Mapping[str, Any]
    figure: str
    unit: str = ""
    peers: Mapping[str, Any] | None = None  # rows of the same figure, of which the lowest is the best
    against: str = ""  # without peers: what the figure is a ratio to

    def line(self, documents: Mapping[str, Mapping[str, Any]]) -> list[str] | None:
        rows = documents.get(self.benchmark, {}).get("rows", [])
        own = next((row for row in rows if matches(row, self.only) and has(row, self.figure)), None)
        if own is None:
            return None
        name, ratio, paired = self.against, "", None
        if self.peers is not None:
            others = [row for row in rows if matches(row, self.peers) and has(row, self.figure) and not is_own(row)]
            if not others:
                return None
            best = min(others, key=lambda row: middle(row[self.figure]))
            name = f"{best.get('contender') or best.get('case')}: {short(middle(best[self.figure]))}{self.unit}"
            paired = best.get("raysgd_ratio")  # of each round
            ratio = short(middle(paired) if paired else middle(own[self.figure]) / middle(best[self.figure]))
        value = paired or own[self.figure]
        rounds, spread = (str(value["count"]), " to ".join(bounds(value))) if isinstance(value, Mapping) else ("", "")
        mine = f"{short(middle(own[self.figure]))}{self.unit}"
        return [self.text, mine if ratio else "", name, ratio or mine, rounds, spread]


def middle(value: Any) -> float:
    return float(value["median"] if isinstance(value, Mapping) else value)


def has(row: Mapping[str, Any], figure: str) -> bool:
    value = row.get(figure)
    return (value.get("median") if isinstance(value, Mapping) else value) is not None


def matches(row: Mapping[str, Any], only: Mapping[str, Any]) -> bool:
    return all(row.get(name) == value for name, value in only.items())


def is_own(row: Mapping[str, Any]) -> bool:
    return str(row.get("contender") or row.get("case")).startswith(("raysgd", "hand-written"))


def of_steps(workload: str, workers: int) -> Claim:
    setting = {"workload": workload, "workers": workers}
    text = f"time of a step, `{workload}`, {workers} worker{'s' * (workers > 1)}"
    return Claim(text, "throughput", {**setting, "contender": "raysgd"}, "us_per_step", " µs", setting)


RAYSGD = {"contender": "raysgd"}
CLAIMS = (
    *(of_steps(workload, workers) for workload in ("tiny", "resnet", "gpt") for workers in (1, 2)),
    *(
        Claim(
            f"time of a step, `{name}`, 2 workers, a new start for each round",
            "stepping",
            {**RAYSGD, "workload": name},
            "ratio",
            against="hand-written",
        )
        for name in ("tiny", "resnet", "gpt")
    ),
    Claim(
        "time of a step, `tiny`, 2 workers, a new start for each round, with a `collate_fn`",
        "stepping",
        {"contender": "raysgd, collating", "workload": "tiny"},
        "ratio",
        against="hand-written",
    ),
    Claim(
        "a call of `train` with one step, 2 workers",
        "call_length",
        {"steps": 1},
        "overhead_ms",
        " ms more",
        against="hand-written",
    ),
    Claim("first epoch of a script", "startup", RAYSGD, "first_epoch_s", " s", {}),
    Claim("first epoch of a script", "startup", RAYSGD, "ratio", against="Ray Train v2"),
    Claim("second trainer of a script, to its first step", "startup", RAYSGD, "second_s", " s"),
    Claim("time without a step after a kill", "recovery", {"case": "raysgd, in place"}, "gap_s", " s", {}),
    Claim("from a kill to the first step of a function", "rerun", RAYSGD, "first_step_s", " s", {}),
    Claim("saving 1 GB, in GB/s", "saving", {**RAYSGD, "mb": 1000}, "synced_ratio", against="`torch.save` and `fsync`"),
    Claim(
        "loading 1 GB, in GB/s", "saving", {**RAYSGD, "mb": 1000}, "load_ratio", against="`torch.load`, not verified"
    ),
    Claim(
        "pause of `save(blocking=False)`, 1 GB",
        "saving",
        {"contender": "raysgd, blocking=False", "mb": 1000},
        "pause_ratio",
        against="one copy in memory",
    ),
)


def summary(documents: Mapping[str, Mapping[str, Any]]) -> str:
    found = [line for claim in CLAIMS if (line := claim.line(documents)) is not None]
    return lines(("claim", "raysgd", "best peer, or what it is compared with", "ratio", "rounds", "spread"), found)


def told(document: Mapping[str, Any]) -> str:
    machine = document["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    gpus = f"{machine['gpu']}, " if "gpu" in machine else ""
    spreads = any(isinstance(row.get(name), Mapping) for row in document["rows"] for name in document["columns"])
    return (
        f"`{document['command']}` on {gpus}{machine['cores']} cores ({machine['cpu']}), "
        f"Python {machine['python']}, {versions}; load average at the end {machine['load'][0]}."
        f"{' Spreads are median (least to most) over the rounds.' if spreads else ''}"
    )


def as_drawn(document: Mapping[str, Any], documents: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """A result as its pictures show it. A curve is that of one kill; the time without a step that is written beside it is the
    median of recovery.py, which makes the same kill several times."""
    cases = {row["case"]: row for row in documents.get("recovery", {}).get("rows", ())}
    medians = {
        name: middle(cases[case]["gap_s"]) for name, case in REPEATED.items() if has(cases.get(case, {}), "gap_s")
    }
    rows = [{**row, "still_s": medians.get(row.get("contender", ""), row.get("still_s"))} for row in document["rows"]]
    return {**document, "rows": rows}


def seen(document: Mapping[str, Any]) -> str:
    """What the pictures of a result show, for those who cannot see them."""
    if document["benchmark"] == "unequal":
        return "What each of four workers computes in an epoch: with equal shares, three wait for the slow one"
    if document["benchmark"] == "sizes":
        return (
            "Seconds without a step over the size of the model, when a worker joins or is killed, beside one broadcast"
        )
    if document["benchmark"] == "same_numbers":
        return "The GPT's validation loss over the epochs: three lines on top of each other"
    parts = [
        f"{row['contender']} {row['still_s']:.2g} s without a step, {row['repeated_samples']:,} samples repeated"
        if "from_s" in row
        else f"{row['contender']} {row['note']}"
        for row in document["rows"]
    ]
    return f"Samples per second before and after one of three workers is killed: {'; '.join(parts)}"


def pictures(document: Mapping[str, Any]) -> str:
    paths = {mode: f"benchmarks/{document['benchmark']}_{mode}.svg" for mode in ("light", "dark")}
    return "\n\n".join(
        f"```{{image}} {path}\n:class: only-{mode}\n:alt: {seen(document)}\n```" for mode, path in paths.items()
    )


def picture(document: Mapping[str, Any]) -> str:
    path = f"docs/benchmarks/{document['benchmark']}"
    return (
        f'<picture>\n  <source media="(prefers-color-scheme: dark)" srcset="{path}_dark.svg">\n'
        f'  <img src="{path}_light.svg" alt="{seen(document)}">\n</picture>'
    )


def filled(text: str, documents: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with every table and picture whose result is there."""

    def content(place: re.Match[str]) -> str:
        head, kind, name, options, end = place.groups()
        if kind == "summary":
            return f"{head}{summary(documents)}\n{end}"
        document = documents.get(name)
        if document is None:
            return place[0]
        if kind == "plots":
            return f"{head}{pictures(as_drawn(document, documents))}\n{end}"
        if kind == "picture":
            return f"{head}{picture(as_drawn(document, documents))}\n{end}"
        only = dict(option.split("=") for option in options.split() if "=" in option)
        shown = matrix(document, options.strip()) if kind == "matrix" else table(document, only)
        return (
            f"{head}{shown}\n\n{told(document)}\n{end}"
            if not only or "told" in options.split()
            else f"{head}{shown}\n{end}"
        )

    return PLACE.sub(content, text)


def fill(results: Path, page: Path) -> None:
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*.json"))]
    text = page.read_text(encoding="utf-8")
    page.write_text(filled(text, {each["benchmark"]: each for each in found}), encoding="utf-8")


if __name__ == "__main__":
    for each in (PAGE, *OTHER_PAGES):
        fill(RESULTS, each)
