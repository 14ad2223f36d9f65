"""Keep what a report shows, and write it as one HTML page, which loads nothing. Driver."""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import groupby, pairwise
from typing import Any

from raysgd.callbacks.base import CallResult, Run, Underway
from raysgd.callbacks.writers import flat, measured_names, recovery_text, scalars
from raysgd.core.decisions.policy import PHASES, Recovery
from raysgd.core.measures.speed import Speed
from raysgd.errors import counted, text_of
from raysgd.storage.masking import mask
from raysgd.version import __version__

Point = tuple[float, float]
Lines = Mapping[str, Sequence[Point]]
MOST_TIMES, MOST_POINTS, MOST_DOTS, MOST_ROWS, MOST_CELL, MOST_TEXT = 1000, 600, 60, 200, 400, 20_000
SLOW = 1.2  # a rank is slow whose own seconds are more than so many times the median of all ranks
PREFIXES = {"train": "train_", "validate": "val(idation)?_", "test": "test_"}  # of the metrics of calls
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")  # what HTML must not contain
# About as wide as a chart is on a phone and on a screen, so that its text has the size that the style sheet says.
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 340, 190, 54, 328, 10, 152
COLOURS, LARGEST, DATE = 7, 1e300, "%Y-%m-%d %H:%M:%S %Z"
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"/><title>%s</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'"/>
<meta name="viewport" content="width=device-width,initial-scale=1"/><style>
:root{color-scheme:light dark;--page:#fff;--text:#1c2127;--soft:#5b6673;--line:#d9dee4;--panel:#f6f8fa;--mark:#c62828;--s0:#1f6feb;
--s1:#d9660a;--s2:#15803d;--s3:#8b3fc7;--s4:#b08800;--s5:#0e7c86;--s6:#8a94a0}@media(prefers-color-scheme:dark){:root{--page:#14181d;
--text:#e6eaef;--soft:#9aa6b2;--line:#313a44;--panel:#1c2229;--mark:#ff7b72;--s0:#6cb0ff;--s1:#ffa657;--s2:#56d37a;--s3:#d2a8ff;
--s4:#e3c04f;--s5:#4fd1d9;--s6:#7d8896}}*{box-sizing:border-box}body{margin:0 auto;max-width:1080px;padding:24px 16px 64px;
background:var(--page);color:var(--text);font:15px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}h1,h2,h3,p{margin:4px 0 8px}
h2{margin-top:36px}h3{font-size:14px}.soft,.key,text{color:var(--soft)}.facts,.bar{display:flex}.facts{flex-wrap:wrap;gap:8px 28px}
.bar{margin-bottom:6px}b{display:block;font-size:18px}td b{font-size:14px;color:var(--mark)}.charts{display:grid;column-gap:14px;
grid-template-columns:repeat(auto-fill,minmax(min(100%%,320px),1fr))}figure{margin:0 0 14px;padding:12px;background:var(--panel);
border:1px solid var(--line);border-radius:6px;min-width:0}svg{width:100%%;max-width:480px;overflow:visible}text{font-size:12px;
fill:currentColor}path{fill:none;stroke:currentColor;stroke-width:1.6}circle{fill:currentColor}.grid{stroke:var(--line);stroke-width:1}
.mark{stroke:var(--mark);stroke-dasharray:4 3}.key{font-size:13px}.key span{display:inline-block;margin-right:12px}i{display:inline-block;
height:10px;background:currentColor}.key i{width:10px;margin-right:4px}table{border-collapse:collapse;font-size:14px}th,td{text-align:left;
padding:5px 10px 5px 0;vertical-align:top;border-bottom:1px solid var(--line);overflow-wrap:normal}pre{white-space:pre-wrap;font-size:13px;
margin:0}.wide{overflow-x:auto}</style></head><body><h1>%s</h1><p class="soft">Written by raysgd %s on %s</p>%s</body></html>
"""


class Timeline:
    """Owns what happened in this process and the rows of a history lack, with the times, in seconds
    since 1970."""

    def __init__(self) -> None:
        self.run: Run | None = None  # the newest one
        self.results: list[tuple[float, Mapping[str, Any]]] = []  # when each came, and its row in the history
        self.recoveries: list[Recovery] = []
        # (time, seconds of training, batches trained), the two counted since the start: at most MOST_TIMES of them, at equal
        # intervals, which double when there would be more.
        self.pace: list[tuple[float, float, float]] = []
        self._interval_s, self._next = 0.5, -math.inf
        self._began = self._trained_s = self._batches = 0.0

    def see_progress(self, now: Underway) -> None:
        if now.kind == "train":
            self._began = self._began if now.worker else time.monotonic()
            self._add_time(time.monotonic() - self._began, now.progress.batches)

    def _add_time(self, seconds: float, batches: float) -> None:
        if (clock := time.monotonic()) >= self._next:
            self._next = clock + self._interval_s
            self.pace.append((time.time(), self._trained_s + seconds, self._batches + batches))
            if len(self.pace) > MOST_TIMES:
                del self.pace[1::2]
                self._interval_s *= 2

    def see_result(self, result: CallResult, row: Mapping[str, Any]) -> None:
        self.results.append((time.time(), row))
        if result.kind == "train":
            self._trained_s += result.seconds
            self._batches += scalars(result.metrics).get("batch_count", 0.0)
            self._add_time(0.0, 0.0)


def page(rows: Sequence[Mapping[str, Any]], timeline: Timeline) -> str:
    """Make the page. Those `rows` that the timeline lacks are of an earlier process."""
    run = timeline.run
    title = _html(f"{run.trainer}: {run.name}" if run is not None else "A training function")
    sections = {
        "Metrics": _metrics(rows),
        "Speed and workers": _over_time(timeline),
        "Recoveries and changes of the workers": _recoveries(timeline.recoveries),
        "Slow ranks": _ranks(run.speed() if run is not None else Speed()),
        "Configuration": _config(run.config if run is not None else {}),
        "Results": _results(rows),
    }
    parts = "".join(f"<section><h2>{head}</h2>{content}</section>" for head, content in sections.items() if content)
    return PAGE % (title, title, _html(__version__), time.strftime(DATE), _facts(rows, timeline) + parts)


def _html(value: Any, most: int = MOST_TEXT) -> str:
    """Convert a value to text that contains no HTML."""
    text = "" if value is None else _number(value) if isinstance(value, float) else text_of(value)
    text = text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"
    return escape(CONTROL.sub("\ufffd", text))


def _number(value: float) -> str:
    return f"{int(value)}" if float(value).is_integer() and abs(value) < 1e6 else f"{value:.4g}"


def _unit(seconds: float) -> tuple[str, float]:
    """Choose the unit in which to show a time of this length, and its seconds."""
    units = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0))
    return next((unit for unit in units if seconds >= 3 * unit[1]), ("seconds", 1.0))


def _table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Make a table of cells that are HTML. It scrolls where the page is narrower."""
    rows = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in line)}</tr>" for line in lines)
    return f'<div class="wide"><table><tr>{"".join(f"<th>{title}</th>" for title in head)}</tr>{rows}</table></div>'


def _facts(rows: Sequence[Mapping[str, Any]], timeline: Timeline) -> str:
    epochs = [row["epoch"] for row in rows if isinstance(row.get("epoch"), int)]
    seconds: dict[str, float] = {}
    for row in rows:
        seconds[f"in {row['kind']}"] = seconds.get(f"in {row['kind']}", 0.0) + row["seconds"]
    seconds["for changes of the workers"] = sum(each.seconds for each in timeline.recoveries)
    facts: dict[str, Any] = {"results": len(rows), "epochs": max(epochs, default=None)}
    facts |= {"workers": rows[-1]["world_size"] if rows else None, "changes of the workers": len(timeline.recoveries)}
    facts |= {name: f"{took / _unit(took)[1]:.3g} {_unit(took)[0]}" for name, took in seconds.items()}
    earlier = len(rows) - len(timeline.results)
    note = f"<p>{counted(earlier, 'result is', 'results are')} from an earlier process. Its times and recoveries are not known here.</p>"
    shown = "".join(f"<div><b>{_html(value)}</b>{name}</div>" for name, value in facts.items() if value is not None)
    return f'<div class="facts">{shown}</div>{note if earlier > 0 else ""}'


def _metrics(rows: Sequence[Mapping[str, Any]]) -> str:
    """Draw a chart of each metric, with that of `train`, `validate` and `test` in one."""
    x = "epoch" if all(row.get("epoch") is not None for row in rows) else "step"
    charts: dict[str, dict[str, list[Point]]] = {}
    for row in rows:
        values = scalars(row)
        for name in measured_names([values]):
            short = re.sub(f"^{PREFIXES.get(row['kind'], '')}", "", name)
            line = charts.setdefault(short, {}).setdefault(name if short == name else row["kind"], [])
            line.append((float(row[x]), values[name]))
    title = "report" if x == "step" and all(row["kind"] == "report" for row in rows) else x
    return _charts(charts, x=title) or '<p class="soft">No metrics yet.</p>'


def _over_time(timeline: Timeline) -> str:
    spans = [(when - row["seconds"], when) for when, row in timeline.results]
    spans += [(each.time - each.seconds, each.time) for each in timeline.recoveries]
    spans += [(when, when) for when, *_ in timeline.pace]
    begin, end = min(spans, default=(0.0, 0.0))[0], max((end for _, end in spans), default=0.0)
    unit, of_unit = _unit(end - begin)

    def at(when: float) -> float:
        return (when - begin) / of_unit

    results = [(at(when), row["kind"], row["seconds"], scalars(row)) for when, row in timeline.results]
    trained = [(x, took, values) for x, kind, took, values in results if kind == "train"]
    batches = [(at(b[0]), max(b[2] - a[2], 0.0) / (b[1] - a[1])) for a, b in pairwise(timeline.pace) if b[1] > a[1]]
    samples = [(x, values["num_samples"] / took) for x, took, values in trained if took and "num_samples" in values]
    sizes = [(x, values["world_size"]) for x, _, _, values in results]
    for each in timeline.recoveries:
        sizes += [(at(each.time - each.seconds), each.world_size_before), (at(each.time), each.world_size_after)]
    sizes = sorted(sizes)
    charts: dict[str, Lines] = {
        "batches per second, while train() runs": {"": batches},
        "samples per second, of each train()": {"": samples},
        "seconds per report": {"": [(x, took) for x, kind, took, _ in results if kind == "report"]},
        "workers": {"": [(0.0, size) for _, size in sizes[:1]] + sizes + [(at(end), size) for _, size in sizes[-1:]]},
    }
    marks = [(at(each.time), f"{each.reason}, {_number(each.seconds)} s") for each in timeline.recoveries]
    dashed = '<p class="soft">The dashed lines are recoveries and other changes of the workers.</p>' if marks else ""
    return _charts(charts, x=f"{unit} since the start", span=(0.0, at(end)), marks=marks) + dashed


def _recoveries(recoveries: Sequence[Recovery]) -> str:
    longest = max((each.seconds for each in recoveries), default=0.0) or 1.0
    shown = ""
    for each in recoveries:
        parts = [each.phases.get(name, 0.0) for name in PHASES]
        parts.append(max(each.seconds - sum(parts), 0.0))
        bar = "".join(
            f'<i style="color:var(--s{n});width:{100 * took / longest:.1f}%"></i>' for n, took in enumerate(parts)
        )
        text = f"<h3>{time.strftime(DATE, time.localtime(each.time))}</h3><p>{_html(recovery_text(each))}</p>"
        shown += f'<figure>{text}<div class="bar">{bar}</div><pre>{_html(each.detail)}</pre></figure>'
    key = f'<p class="key">Parts of the seconds: {_key([*PHASES, "other"])}</p>'
    return key + shown if shown else '<p class="soft">No worker failed, left or joined.</p>'


def _ranks(speed: Speed) -> str:
    """Show what each rank does in a batch."""
    times = [each.data_seconds + each.compute_seconds for each in speed.ranks]
    if not any(times):
        return ""
    usual, lines = statistics.median_low(times), []
    for each, took in zip(speed.ranks, times, strict=True):
        place = ", ".join([each.node, *(f"GPU {number}" for number in each.gpus)])
        seconds = [each.data_seconds, each.compute_seconds, each.wait_seconds]
        share = f"{took / usual:.2g}" if usual else ""
        cells = [_html(place), *("" if one is None else _number(1000 * one) for one in seconds)]
        lines.append([str(each.rank), *cells, f"<b>{share}: slow</b>" if took > SLOW * usual > 0 else share])
    unknown = speed.ranks[0].wait_seconds is None and len(times) > 1
    text = f"""Milliseconds per batch: means over the newest batches of train() since the last change of the workers. The ratio is that
        of data and computing to the median of the ranks. A rank is slow if its ratio is above {SLOW:g}.
        {"Here, computing includes the wait for the other ranks. " if unknown else ""}{_html(speed.text)}"""
    return f'<p class="soft">{text}</p>{_table(["rank", "place", "data", "computing", "waiting", "ratio"], lines)}'


def _config(config: Mapping[str, Any]) -> str:
    lines = []
    for name, value in flat(config).items():
        texts = [mask(text_of(each)) for each in (value if isinstance(value, (list, tuple)) else [value])]
        lines.append([_html(name), f"<pre>{_html(', '.join(texts))}</pre>"])
    return _table(["name", "value"], lines) if lines else ""


def _results(rows: Sequence[Mapping[str, Any]]) -> str:
    shown = rows[-MOST_ROWS:]
    names = list(dict.fromkeys(name for row in shown for name in row if not name.startswith("_")))
    table = _table(map(_html, names), [[_html(row.get(name), MOST_CELL) for name in names] for row in shown])
    return f"<details><summary>The newest {len(shown)} of {len(rows)}</summary>{table}</details>"


def _charts(charts: Mapping[str, Lines], **options: Any) -> str:
    figures = ""
    for title, lines in charts.items():
        lines = {name: line for name, line in lines.items() if line}
        notes = [_key(lines)] if [*lines] not in ([title], [""]) else []
        left_out = sum(not _drawable(point) for line in lines.values() for point in line)
        notes += (
            [f"{counted(left_out, 'value is', 'values are')} left out: not finite, or too large."] if left_out else []
        )
        keys = "".join(f'<p class="key">{note}</p>' for note in notes)
        chart = f"<h3>{_html(title)}</h3>{keys}{_line_chart(lines, **options)}"
        figures += f"<figure>{chart}</figure>" if lines else ""
    return f'<div class="charts">{figures}</div>' if figures else ""


def _key(names: Iterable[str]) -> str:
    return "".join(
        f'<span><i style="color:var(--s{n % COLOURS})"></i>{_html(name)}</span>' for n, name in enumerate(names)
    )


def _drawable(point: Point) -> bool:
    return abs(point[1]) < LARGEST


def _line_chart(series: Lines, x: str, span: Sequence[float] = (), marks: Sequence[tuple[float, str]] = ()) -> str:
    """Draw the lines of `series` as SVG, over an axis with the title `x`. With `span`, the
    horizontal axis includes it, and the vertical one begins at 0. `marks` are vertical lines:
    where, and what the pointer shows there. A line is interrupted where a value is not finite."""
    points = [point for line in series.values() for point in line if _drawable(point)] or [(0.0, 0.0)]
    left, right, x_ticks = _axis([*(at for at, _ in points), *(at for at, _ in marks), *span])
    low, high, y_ticks = _axis([*(value for _, value in points), *([0.0] if span else [])])
    low, high = min(low, *y_ticks), max(high, *y_ticks)

    def place(at: float, value: float) -> Point:
        across, up = (at - left) / (right - left), (value - low) / (high - low)
        return round(LEFT + (RIGHT - LEFT) * across, 1), round(BOTTOM - (BOTTOM - TOP) * up, 1)

    drawn = f'<text x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">{_html(x)}</text>'
    for tick in (tick for tick in x_ticks if left <= tick <= right):
        drawn += f'<text x="{place(tick, low)[0]}" y="{BOTTOM + 16}" text-anchor="middle">{_number(tick)}</text>'
    for tick, y in ((tick, place(left, tick)[1]) for tick in y_ticks):
        drawn += f'<path class="grid" d="M{LEFT} {y}H{RIGHT}"/>'
        drawn += f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{_number(tick)}</text>'
    for at, text in marks:
        drawn += f'<path class="mark" d="M{place(at, low)[0]} {TOP}V{BOTTOM}"><title>{_html(text)}</title></path>'
    for colour, (name, line) in enumerate(series.items()):
        path = dots = ""
        for drawable, part in groupby(line, key=_drawable):
            for n, (at, value) in enumerate(_thinned([*part]) if drawable else ()):
                x_px, y_px = place(at, value)
                path += f"{'L' if n else 'M'}{x_px} {y_px}"
                title = f"<title>{_html(name)}: {_number(value)}</title>"
                dots += f'<circle cx="{x_px}" cy="{y_px}" r="2.5">{title}</circle>' if len(line) <= MOST_DOTS else ""
        drawn += f'<g style="color:var(--s{colour % COLOURS})"><path d="{path}"/>{dots}</g>'
    label = f"{_html(', '.join(series))} over {_html(x)}"
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{drawn}</svg>'


def _thinned(line: Sequence[Point]) -> Sequence[Point]:
    """Choose about MOST_POINTS points of a line: the extremes of each stretch, and the last."""
    size = 1 + 2 * len(line) // MOST_POINTS
    stretches = [sorted(line[start : start + size], key=lambda point: point[1]) for start in range(0, len(line), size)]
    return line if size == 1 else [*(point for part in stretches for point in sorted((part[0], part[-1]))), line[-1]]


def _axis(values: Sequence[float]) -> tuple[float, float, list[float]]:
    """The ends of an axis, and round numbers that cover these values."""
    low, high = min(values), max(values)
    if low == high:
        half = abs(low) / 2 or 0.5
        return low - half, high + half, [low]
    power = 10.0 ** math.floor(math.log10(max((high - low) / 5, 1 / LARGEST)))
    step = next((power * each for each in (1, 2, 2.5, 5) if power * each >= (high - low) / 5), 10 * power)
    step = max(math.ceil(step), 1) if all(float(value).is_integer() for value in values) else step
    return low, high, [float(f"{step * n:.12g}") for n in range(math.floor(low / step), math.ceil(high / step) + 1)]
