"""Pictures of the measured results: PNG, or SVG in a light and a dark variant.

    python examples/benchmarks/plots.py        from results/ into docs/benchmarks/

Bars are medians over the rounds; whiskers go from the least to the most.
"""

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.patches
from fill_page import as_drawn
from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
Rows = Sequence[Mapping[str, Any]]
# raysgd stands out; the others keep their colour in every picture.
COLOURS = {
    "raysgd": "#c1440e",
    "raysgd, collating": "#e8946f",
    "hand-written": "#444444",
    "torchrun": "#8a8a8a",
    "Ray Train v2": "#2b6ca3",
    "Lightning": "#7a4fa3",
    "Accelerate": "#d9a514",
    "Horovod": "#c46a9b",
}
OTHERS = ("#3a8f6b", "#79b791", "#5b7f95", "#b08968")
DPI = 100
RATIO_SHOWN = 2.0


def colour(name: str, number: int = 0) -> str:
    """A contender's, also under a longer name such as "raysgd, in place"."""
    return COLOURS.get(name) or COLOURS.get(name.split(",")[0], OTHERS[number % len(OTHERS)])


def ordered(values: Any) -> list[Any]:
    """Each once, in the order in which they come."""
    return list(dict.fromkeys(values))


def median(row: Mapping[str, Any], name: str) -> float | None:
    value = row.get(name)
    value = value["median"] if isinstance(value, Mapping) else value
    return None if value is None else float(value)


def whiskers(row: Mapping[str, Any], name: str) -> tuple[float, float]:
    value = row.get(name)
    if not isinstance(value, Mapping):
        return 0.0, 0.0
    return value["median"] - value["least"], value["most"] - value["median"]


def figure(width: float, height: float, columns: int = 1, title: str = "") -> tuple[Figure, list[Axes]]:
    drawn = Figure(figsize=(width, height), layout="constrained")
    if title:
        drawn.suptitle(title, fontsize=11)
    axes = drawn.subplots(1, columns, squeeze=False)[0]
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.tick_params(labelsize=8)
    return drawn, list(axes)


def throughput(rows: Rows) -> dict[str, Figure]:
    """For each precision: time over the hand-written loop's, a group of bars for each number of workers."""
    return {
        f"throughput_{precision}": ratios(
            [row for row in rows if row["precision"] == precision and median(row, "ratio") is not None],
            f"{precision}: time of an epoch over the hand-written loop's (lower is better)",
        )
        for precision in ordered(row["precision"] for row in rows)
    }


def ratios(rows: Rows, title: str) -> Figure:
    workloads = ordered(row["workload"] for row in rows)
    drawn, axes = figure(3.4 * len(workloads) + 0.6, 3.4, len(workloads), title)
    names = ordered(row["contender"] for row in rows)
    for axis, workload in zip(axes, workloads, strict=True):
        own = [row for row in rows if row["workload"] == workload]
        groups = ordered(row["workers"] for row in own)
        for row in own:
            number = names.index(row["contender"])
            place = groups.index(row["workers"]) + (number - (len(names) - 1) / 2) * 0.8 / len(names)
            bar(axis, place, row, "ratio", number, 0.8 / len(names), at_most=RATIO_SHOWN)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.axhline(1.05 if workload == "tiny" else 1.02, color=COLOURS["raysgd"], linewidth=0.8, linestyle=":")
        axis.set_xticks(range(len(groups)), [f"{group} worker{'s' * (group > 1)}" for group in groups])
        axis.set_ylim(0, RATIO_SHOWN * 1.05)
        axis.set_title(workload, fontsize=9)
    handles = [matplotlib.patches.Patch(color=colour(name, number), label=name) for number, name in enumerate(names)]
    drawn.legend(handles=handles, loc="outside lower center", ncols=len(names), fontsize=8, frameon=False)
    return drawn


def bar(axis: Axes, place: float, row: Mapping[str, Any], what: str, number: int, width: float, at_most: float) -> None:
    """One bar with its whiskers. One that is too high for the picture is cut, and has its figure on it."""
    value = median(row, what)
    assert value is not None
    shown = min(value, at_most)
    axis.bar(place, shown, width * 0.92, color=colour(row["contender"], number))
    if value > at_most:
        axis.annotate(f"{value:.2g}", (place, shown), ha="center", va="bottom", fontsize=7)
        return
    below, above = whiskers(row, what)
    axis.errorbar(place, value, [[below], [min(above, at_most - value)]], color="black", linewidth=0.7)


def lying(rows: Rows, label: str, what: str, unit: str, title: str, line: float | None = None) -> Figure:
    """Lying bars, one for each row, with the figure beside it."""
    rows = [row for row in rows if median(row, what) is not None][::-1]
    drawn, (axis,) = figure(6.4, 0.9 + 0.36 * len(rows), 1, title)
    for number, row in enumerate(rows):
        value, (below, above) = median(row, what), whiskers(row, what)
        axis.barh(number, value, 0.7, color=colour(row[label], number))
        axis.errorbar(value, number, xerr=[[below], [above]], color="black", linewidth=0.7)
        axis.annotate(
            f"{value:.3g}", (value + above, number), (4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axis.set_yticks(range(len(rows)), [row[label] for row in rows])
    axis.set_xlabel(unit, fontsize=8)
    axis.margins(x=0.12)
    if line is not None:
        axis.axvline(line, color="black", linewidth=0.8)
    return drawn


def startup(rows: Rows) -> dict[str, Figure]:
    title = "From the start of a script to the end of its first epoch"
    return {"startup": lying(rows, "contender", "first_epoch_s", "seconds", title)}


def recovery(rows: Rows) -> dict[str, Figure]:
    return {"recovery": lying(rows, "case", "gap_s", "seconds without a step", "A worker is killed")}


def rerun(rows: Rows) -> dict[str, Figure]:
    title = "From the kill of a worker to the first step of the function that runs again"
    return {"rerun": lying(rows, "contender", "first_step_s", "seconds", title)}


def curves(axis: Axes, rows: Rows, across: str, what: str, title: str, unit: str) -> None:
    """One line for each contender."""
    for number, name in enumerate(ordered(row["contender"] for row in rows)):
        own = [row for row in rows if row["contender"] == name and median(row, what) is not None]
        if own:
            style = "--" if "," in name else "-"
            values = [median(row, what) for row in own]
            axis.plot([row[across] for row in own], values, style, marker="o", color=colour(name, number), label=name)
    axis.set_title(title, fontsize=9)
    axis.set_ylabel(unit, fontsize=8)
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=7, frameon=False)


def saving(rows: Rows) -> dict[str, Figure]:
    drawn, axes = figure(10.4, 3.2, 3, "Checkpoints")
    curves(axes[0], rows, "mb", "save_gb_s", "saving", "GB/s")
    curves(axes[1], rows, "mb", "load_gb_s", "loading", "GB/s")
    curves(axes[2], rows, "mb", "pause_s", "how long training waits", "seconds")
    axes[2].set_ylim(auto=True)
    axes[2].set_yscale("log")
    for axis in axes:
        axis.set_xscale("log")
        axis.set_xlabel("MB of weights", fontsize=8)
    return {"saving": drawn}


def call_length(rows: Rows) -> dict[str, Figure]:
    drawn, (axis,) = figure(4.6, 3.0, 1, "What a call costs beside its steps")
    lengths = [median(row, "hand_written_ms") for row in rows]
    axis.plot(lengths, [median(row, "overhead_ms") for row in rows], marker="o", color=colour("raysgd"))
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_xscale("log")
    axis.set_xlabel("hand-written epoch, ms", fontsize=8)
    axis.set_ylabel("raysgd's call takes longer by, ms", fontsize=8)
    return {"call_length": drawn}


def gpu(rows: Rows) -> dict[str, Figure]:
    pictures = {}
    for workload in ordered(row["workload"] for row in rows):
        own = [row for row in rows if row["workload"] == workload and median(row, "ratio") is not None]
        what, unit = ("tokens_per_s", "tokens/s") if "gpt" in workload else ("samples_per_s", "images/s")
        precisions = ordered(row["precision"] for row in own)
        drawn, axes = figure(3.2 * len(precisions) + 0.6, 3.0, len(precisions), f"{workload}, {unit}")
        for axis, precision in zip(axes, precisions, strict=True):
            for number, row in enumerate(row for row in own if row["precision"] == precision):
                bar(axis, number, row, what, number, 0.8, at_most=float("inf"))
                axis.annotate(
                    row["contender"],
                    (number, 0),
                    (0, 4),
                    textcoords="offset points",
                    rotation=90,
                    fontsize=8,
                    color="white",
                    ha="center",
                )
            axis.set_xticks([])
            axis.set_title(precision, fontsize=9)
        pictures[f"gpu_{''.join(filter(str.isalnum, workload))}"] = drawn
    return pictures


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


PLOTS: dict[str, Callable[[Rows], dict[str, Figure]]] = {
    "throughput": throughput,
    "startup": startup,
    "recovery": recovery,
    "kill_curve": kill_curve,
    "rerun": rerun,
    "saving": saving,
    "call_length": call_length,
    "gpu": gpu,
    "scale": scale,
}


def plot_all(results: Path, into: Path) -> list[Path]:
    """Draws what there are results of; the files."""
    written = []
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*.json"))]
    documents = {each["benchmark"]: each for each in found}
    for document in found:
        draw = PLOTS.get(document["benchmark"])
        for name, drawn in (draw(as_drawn(document, documents)["rows"]) if draw else {}).items():
            into.mkdir(parents=True, exist_ok=True)
            vector = name.endswith(("_light", "_dark"))
            written.append(into / f"{name}.{'svg' if vector else 'png'}")
            with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
                drawn.savefig(written[-1], dpi=DPI, metadata={"Date": None} if vector else {"Software": None})
    return written


if __name__ == "__main__":
    for path in plot_all(HERE / "results", HERE.parents[1] / "docs" / "benchmarks"):
        print(path)
