"""The pictures of what kill_curve.py, same_numbers.py, sizes.py and unequal.py found: SVG, in a light and a dark variant.

python examples/benchmarks/plots.py        from results/ into docs/benchmarks/
"""

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from fill_page import as_drawn, middle
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
Rows = Sequence[Mapping[str, Any]]
# The ink of each variant, and a colour for each contender that is readable on both.
INKS = {"light": "#1f2328", "dark": "#d0d4da"}
RATES = ("new_per_s", "repeated_per_s")
VIVID = {"raysgd": "#e0632b", "Ray Train v2": "#4a90d9", "torchrun": "#8d96a0"}


def bare(height: float, rows: int, ink: str) -> tuple[Figure, list[Any]]:
    """Return a figure without a background, whose lines and texts have one colour, and its axes."""
    drawn = Figure(figsize=(5.0, height), layout="constrained", facecolor="none")
    axes = [each[0] for each in drawn.subplots(rows, 1, squeeze=False, sharex=True)]
    for axis in axes:
        axis.set_facecolor("none")
        axis.spines[["top", "right"]].set_visible(False)
        axis.spines[["left", "bottom"]].set_color(ink)
        axis.tick_params(labelsize=10, colors=ink)
    return drawn, axes


def kill_curve(rows: Rows) -> dict[str, Figure]:
    """Samples per second over the time since the kill, one above the other on one scale; repeated samples are hatched.
    It is narrow, so that its texts are readable on a phone."""
    totals = [[sum(both) for both in zip(*map(row.get, RATES), strict=True)] if "from_s" in row else [] for row in rows]
    pictures = {}
    for mode, ink in INKS.items():
        drawn, axes = bare(1.35 * len(rows) + 0.9, len(rows), ink)
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
        axes[len(axes) // 2].set_ylabel("samples per second", fontsize=10, color=ink)
        under = "seconds since one of three workers was killed"
        if any(row.get("repeated_samples") for row in rows):
            under += "\n(hatched: samples that were trained again)"
        axes[-1].set_xlabel(under, fontsize=10, color=ink)
        pictures[f"kill_curve_{mode}"] = drawn
    return pictures


def same_numbers(rows: Rows) -> dict[str, Figure]:
    """The GPT's loss after each epoch in three runs, on top of each other: the widest line is drawn first."""
    row = next((row for row in rows if row["program"] == "gpt"), None)
    pictures = {}
    for mode, ink in INKS.items() if row else ():
        drawn, (axis,) = bare(3.2, 1, ink)
        for (way, (label, hue)), width in zip(WAYS.items(), (9, 5, 1.5), strict=True):
            losses = row["curves"][way]
            axis.plot(
                range(1, len(losses) + 1), losses, color=hue, linewidth=width, label=label, solid_capstyle="round"
            )
        for epoch in row["killed_in"]:
            axis.axvline(epoch, color=ink, linewidth=1, linestyle=":")
        axis.set_xlabel("epoch (dotted: a worker is killed in it)", fontsize=10, color=ink)
        axis.set_ylabel("validation loss", fontsize=10, color=ink)
        axis.legend(fontsize=10, frameon=False, labelcolor=ink)
        pictures[f"same_numbers_{mode}"] = drawn
    return pictures


def unequal(rows: Rows) -> dict[str, Figure]:
    """For how long of an epoch each of the most workers computes its rows and, hatched, waits for the others."""
    most = max(row["workers"] for row in rows)
    shown = {"equal shares": "'equal'", "shares by speed": "'speed'"}
    found = {
        title: next(row for row in rows if row["workers"] == most and shares in row["contender"])
        for title, shares in shown.items()
    }
    pictures = {}
    for mode, ink in INKS.items():
        drawn, axes = bare(4.2, len(found), ink)
        for axis, (title, row) in zip(axes, found.items(), strict=True):
            own, took = row["own_s"], row["epoch_s"]["median"]
            ranks = [f"rank {rank}" for rank in range(most)]
            axis.barh(ranks, own, color=VIVID["raysgd"])
            waits = [max(took - each, 0.0) for each in own]
            axis.barh(ranks, waits, left=own, facecolor="none", edgecolor=VIVID["raysgd"], hatch="////")
            axis.invert_yaxis()
            axis.set_title(title, loc="left", fontsize=11, color=ink, fontweight="bold")
            axis.set_title(f"{took:.1f} s", loc="right", fontsize=10, color=ink)
        axes[-1].set_xlabel("seconds of an epoch (hatched: not computing)", fontsize=10, color=ink)
        pictures[f"unequal_{mode}"] = drawn
    return pictures


def sizes(rows: Rows) -> dict[str, Figure]:
    """Seconds without a step over the size of the model, with Adam and two workers, both on scales of powers of ten."""
    own = sorted((row for row in rows if (row["optimizer"], row["workers"]) == ("Adam", 2)), key=lambda row: row["mb"])
    pictures = {}
    for mode, ink in INKS.items():
        drawn, (axis,) = bare(4.6, 1, ink)
        for name, (label, hue, style) in MOVES.items():
            points = [(row["mb"], middle(row[name])) for row in own if row.get(name) is not None]
            axis.plot(*zip(*points, strict=True), color=hue, label=label, linestyle=style, marker="o", linewidth=2)
        axis.set(xscale="log", yscale="log")
        axis.minorticks_off()
        axis.set_xlabel("MB of parameters; Adam has twice as much beside them", fontsize=10, color=ink)
        axis.set_ylabel("seconds", fontsize=10, color=ink)
        shown = axis.get_legend_handles_labels()
        drawn.legend(*shown, fontsize=10, frameon=False, labelcolor=ink, loc="outside lower center")
        pictures[f"sizes_{mode}"] = drawn
    return pictures


MOVES = {
    "train_v2_s": ("Ray Train v2: a worker is killed", "#4a90d9", "-"),
    "growth_s": ("raysgd: a worker joins", "#e0632b", "-"),
    "kill_still_s": ("raysgd: a worker is killed", "#e0632b", "--"),
    "broadcast_s": ("the state in one broadcast", "#8d96a0", "-"),
}
WAYS = {
    "by_hand": ("torchrun", "#8d96a0"),
    "raysgd": ("raysgd", "#4a90d9"),
    "three_kills": ("raysgd, three workers killed", "#e0632b"),
}


PLOTS = {"kill_curve": kill_curve, "same_numbers": same_numbers, "sizes": sizes, "unequal": unequal}


def plot_all(results: Path, into: Path) -> list[Path]:
    """Draw what there are results of. Return the files."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*.json"))]
    documents = {each["benchmark"]: each for each in found}
    written = []
    for benchmark in PLOTS.keys() & documents.keys():
        for name, drawn in PLOTS[benchmark](as_drawn(documents[benchmark], documents)["rows"]).items():
            into.mkdir(parents=True, exist_ok=True)
            written.append(into / f"{name}.svg")
            with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
                drawn.savefig(written[-1], dpi=100, metadata={"Date": None})
    return written


if __name__ == "__main__":
    for path in plot_all(HERE / "results", HERE.parents[1] / "docs" / "benchmarks"):
        print(path)
