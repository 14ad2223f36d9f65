"""The picture of kill_curve.py's result: SVG, in a light and a dark variant.

python examples/benchmarks/plots.py        from results/ into docs/benchmarks/
"""

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from fill_page import as_drawn
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
Rows = Sequence[Mapping[str, Any]]
# The ink of each variant, and a colour for each contender that is readable on both.
INKS = {"light": "#1f2328", "dark": "#d0d4da"}
RATES = ("new_per_s", "repeated_per_s")
VIVID = {"raysgd": "#e0632b", "Ray Train v2": "#4a90d9", "torchrun": "#8d96a0"}


def kill_curve(rows: Rows) -> dict[str, Figure]:
    """Samples per second over the time since the kill, one above the other on one scale; repeated samples are hatched.
    It is narrow, so that its texts are readable on a phone."""
    totals = [[sum(both) for both in zip(*map(row.get, RATES), strict=True)] if "from_s" in row else [] for row in rows]
    pictures = {}
    for mode, ink in INKS.items():
        drawn = Figure(figsize=(5.0, 1.35 * len(rows) + 0.9), layout="constrained", facecolor="none")
        axes = [each[0] for each in drawn.subplots(len(rows), 1, squeeze=False, sharex=True)]
        for axis, row, total in zip(axes, rows, totals, strict=True):
            axis.set_facecolor("none")
            axis.spines[["top", "right"]].set_visible(False)
            axis.spines[["left", "bottom"]].set_color(ink)
            axis.tick_params(labelsize=10, colors=ink)
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


def plot_all(results: Path, into: Path) -> list[Path]:
    """Draw the picture, if there is a result. Return its files."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*.json"))]
    documents = {each["benchmark"]: each for each in found}
    if "kill_curve" not in documents:
        return []
    into.mkdir(parents=True, exist_ok=True)
    written = []
    for name, drawn in kill_curve(as_drawn(documents["kill_curve"], documents)["rows"]).items():
        written.append(into / f"{name}.svg")
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
            drawn.savefig(written[-1], dpi=100, metadata={"Date": None})
    return written


if __name__ == "__main__":
    for path in plot_all(HERE / "results", HERE.parents[1] / "docs" / "benchmarks"):
        print(path)
