"""Pictures of the measured results: SVG, in a light and a dark variant.

python examples/benchmarks/plots.py        from results/ into docs/benchmarks/
"""

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from fill_page import as_drawn
from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
Rows = Sequence[Mapping[str, Any]]
# How a picture in a light and a dark variant looks on the page: its ink, and one colour for each contender that is
# readable on both.
INKS = {"light": "#1f2328", "dark": "#d0d4da"}
RATES = ("new_per_s", "repeated_per_s")
VIVID = {"raysgd": "#e0632b", "Ray Train v2": "#4a90d9", "torchrun": "#8d96a0"}


def bare(height: float, rows: int, ink: str, sharex: bool = False, width: float = 6.0) -> tuple[Figure, list[Axes]]:
    """A figure without a background, whose lines and texts have one colour."""
    drawn = Figure(figsize=(width, height), layout="constrained", facecolor="none")
    axes = [each[0] for each in drawn.subplots(rows, 1, squeeze=False, sharex=sharex)]
    for each in axes:
        each.set_facecolor("none")
        each.spines[["top", "right"]].set_visible(False)
        each.spines[["left", "bottom"]].set_color(ink)
        each.tick_params(labelsize=9, colors=ink)
    return drawn, axes


def kill_curve(rows: Rows) -> dict[str, Figure]:
    """Samples per second over the time since the kill, one above the other on one scale; repeated samples are hatched.
    It is narrow, so that its texts are readable on a phone."""
    totals = [[sum(both) for both in zip(*map(row.get, RATES), strict=True)] if "from_s" in row else [] for row in rows]
    pictures = {}
    for mode, ink in INKS.items():
        drawn, axes = bare(1.35 * len(rows) + 0.9, len(rows), ink, sharex=True, width=5.0)
        for axis, row, total in zip(axes, rows, totals, strict=True):
            axis.set_title(row["contender"], loc="left", fontsize=11, color=ink, fontweight="bold")
            axis.axvline(0, color=ink, linewidth=1, linestyle=":")
            if not total:
                note = textwrap.fill(row["note"], 40)  # a longer line would make the axes narrower
                axis.annotate(note, (0.12, 0.3), xycoords="axes fraction", fontsize=10, color=ink)
                axis.set_yticks([])
                continue
            hue, new = VIVID[row["contender"]], row["new_per_s"]
            edges = [*row["from_s"], row["from_s"][-1] + row["bin_s"]]
            axis.stairs(new, edges, fill=True, color=hue)
            axis.stairs(total, edges, baseline=new, fill=True, facecolor="none", edgecolor=hue, hatch="////")
            axis.set_ylim(0, 1.1 * max(map(max, filter(None, totals))))
            said = f"{row['still_s']:.2g} s without a step"
            if row["repeated_samples"]:
                said += f", {row['repeated_samples']:,} repeated"
            axis.set_title(said, loc="right", fontsize=10, color=ink)
            axis.tick_params(labelsize=10)
        axes[len(axes) // 2].set_ylabel("samples per second", fontsize=10, color=ink)
        under = "seconds since one of three workers was killed"
        if any(row.get("repeated_samples") for row in rows):
            under += "\n(hatched: samples that were trained again)"
        axes[-1].set_xlabel(under, fontsize=10, color=ink)
        pictures[f"kill_curve_{mode}"] = drawn
    return pictures


def scale(rows: Rows) -> dict[str, Figure]:
    """Where the time of a recovery goes, for each number of ranks, as lying bars whose parts add up."""
    failed = [row for row in rows if row["case"] == "one"]
    pictures = {}
    for mode, ink in INKS.items():
        drawn, (axis,) = bare(0.5 * len(failed) + 1.1, 1, ink)
        for number, row in enumerate(reversed(failed)):
            phases = {label: row[name] for name, label in PHASES.items()}
            left, total = 0.0, sum(phases.values())
            for hue, (name, seconds) in zip(PHASE_COLOURS, phases.items(), strict=True):
                share = seconds / total * 100
                label = name if number == 0 else None
                axis.barh(number, share, 0.62, left=left, color=hue, label=label)
                left += share
            axis.annotate(f"{total * 1000:.0f} ms", (101, number), va="center", fontsize=9, color=ink)
        axis.set_yticks(range(len(failed)), [f"{row['ranks']:,} ranks" for row in reversed(failed)])
        axis.set_xlim(0, 110)
        axis.set_xlabel("share of the recovery, in percent (the total beside each bar)", fontsize=9, color=ink)
        drawn.legend(loc="outside upper center", ncols=4, fontsize=9, frameon=False, labelcolor=ink)
        pictures[f"scale_{mode}"] = drawn
    return pictures


PHASES = {
    "detect_s": "detect, release",
    "agree_s": "agree, assign",
    "rendezvous_s": "leave, rendezvous",
    "call_s": "call",
}
PHASE_COLOURS = ("#e0632b", "#e9a13b", "#4a90d9", "#4fa37a")


PLOTS: dict[str, Callable[[Rows], dict[str, Figure]]] = {"kill_curve": kill_curve, "scale": scale}


def plot_all(results: Path, into: Path) -> list[Path]:
    """Draws what there are results of; the files."""
    written = []
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*.json"))]
    documents = {each["benchmark"]: each for each in found}
    for document in found:
        draw = PLOTS.get(document["benchmark"])
        for name, drawn in (draw(as_drawn(document, documents)["rows"]) if draw else {}).items():
            into.mkdir(parents=True, exist_ok=True)
            written.append(into / f"{name}.svg")
            with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
                drawn.savefig(written[-1], dpi=100, metadata={"Date": None})
    return written


if __name__ == "__main__":
    for path in plot_all(HERE / "results", HERE.parents[1] / "docs" / "benchmarks"):
        print(path)
