"""Write what a history knows about a run as one HTML page, which loads nothing and runs no script. Driver."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from raysgd.callbacks.charts import MOST_SERIES, Point, as_html, line_chart, time_unit
from raysgd.callbacks.timeline import Timeline
from raysgd.callbacks.writers import flat, measured_names, scalars
from raysgd.core.metrics import SECONDS
from raysgd.core.policy import PHASES, Recovery
from raysgd.storage.masking import mask
from raysgd.version import __version__

__all__ = ["page"]

MOST_CHARTS, MOST_ROWS = 24, 200
OF_SPEED = (*SECONDS.values(), "samples_per_second")  # what `Throughput` adds is in the charts of the speed
SLOW = 1.2  # a rank is slow whose own seconds are so many times the median of all ranks
WORKERS = "workers"
OF_CALLS = {"train": ("train_",), "validate": ("validation_", "val_"), "test": ("test_",)}  # how metrics of calls begin
STYLE = """
:root{color-scheme:light dark;--page:#fff;--text:#1c2127;--soft:#5b6673;--line:#d9dee4;--panel:#f6f8fa;--mark:#c62828;
--s0:#1f6feb;--s1:#d9660a;--s2:#15803d;--s3:#8b3fc7;--s4:#b08800;--s5:#0e7c86;--s6:#8a94a0}
@media (prefers-color-scheme:dark){:root{--page:#14181d;--text:#e6eaef;--soft:#9aa6b2;--line:#313a44;--panel:#1c2229;
--mark:#ff7b72;--s0:#6cb0ff;--s1:#ffa657;--s2:#56d37a;--s3:#d2a8ff;--s4:#e3c04f;--s5:#4fd1d9;--s6:#7d8896}}
*{box-sizing:border-box}body{margin:0 auto;max-width:1080px;padding:24px 16px 64px;background:var(--page);color:var(--text);
font:15px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}h1{font-size:26px;margin:0 0 4px}h2{font-size:19px;margin:36px 0 8px}
h3{font-size:14px;margin:0 0 4px}p{margin:4px 0 10px}.soft,.none{color:var(--soft)}.facts{display:flex;flex-wrap:wrap;gap:8px 28px}
.facts div{min-width:90px}.facts b{display:block;font-size:18px}.charts{display:grid;gap:14px;
grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr))}figure{margin:0;padding:12px;background:var(--panel);
border:1px solid var(--line);border-radius:6px;min-width:0}svg{display:block;width:100%;height:auto}svg text{font-size:11px;
fill:var(--soft)}svg path{fill:none;stroke:currentColor;stroke-width:1.6}svg circle{fill:currentColor}svg .grid{stroke:var(--line);
stroke-width:1}svg .mark{stroke:var(--mark);stroke-dasharray:4 3}.key{font-size:12px;color:var(--soft);margin:0}.key span{
margin-right:12px}.key i,.bar i{display:inline-block;height:10px;background:currentColor}.key i{width:10px;margin-right:4px;
border-radius:2px}.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:13px}th,td{text-align:left;
padding:5px 10px 5px 0;border-bottom:1px solid var(--line);vertical-align:top;overflow-wrap:normal}td.text{min-width:220px;
overflow-wrap:anywhere}.bar{display:flex;min-width:110px;margin-bottom:2px}pre{white-space:pre-wrap;overflow-wrap:anywhere;
font-size:12px;margin:0}.slow{color:var(--mark);font-weight:600}summary{cursor:pointer}
""" + "".join(f".s{number}{{color:var(--s{number})}}" for number in range(MOST_SERIES + 1))


def page(rows: Sequence[Mapping[str, Any]], timeline: Timeline) -> str:
    """Return the page. `rows` are those of a history. Those before the timeline's are of an earlier process."""
    run = timeline.run
    name = f"{run.trainer}: {run.name}" if run is not None else "A training function"
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    parts = [
        _facts(rows, timeline),
        _section("Metrics", _metrics(rows)),
        _section("Speed and workers", _over_time(timeline)),
        _section("Recoveries and changes of the workers", _recoveries(timeline.recoveries)),
        _section("Slow ranks", _ranks(timeline)),
        _section("Configuration", _config(run.config) if run is not None and run.config else ""),
        _section("Results", _results(rows)),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{as_html(name)}</title><style>{STYLE}</style></head><body><h1>{as_html(name)}</h1>"
        f'<p class="soft">Written by raysgd {as_html(__version__)} on {_time(datetime.now().timestamp())}</p>'
        f"{''.join(parts)}</body></html>\n"
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def _duration(seconds: float) -> str:
    unit, of_unit = time_unit(seconds)
    return f"{seconds / of_unit:.3g} {unit}"


def _number(value: float) -> str:
    return f"{value:.4g}"


# -- the parts of the page ----------------------------------------------------------------------------


def _facts(rows: Sequence[Mapping[str, Any]], timeline: Timeline) -> str:
    epochs = [row["epoch"] for row in rows if isinstance(row.get("epoch"), int)]
    kinds = [kind for kind in ("train", "validate", "test", "report") if any(row["kind"] == kind for row in rows)]
    facts = {
        "results": len(rows),
        "epochs": max(epochs, default=None),
        "workers": rows[-1]["world_size"] if rows else None,
        **{f"in {kind}": _duration(sum(row["seconds"] for row in rows if row["kind"] == kind)) for kind in kinds},
        "changes of the workers": len(timeline.recoveries),
        "for these changes": _duration(sum(each.seconds for each in timeline.recoveries)),
    }
    shown = "".join(f"<div><b>{as_html(value)}</b>{name}</div>" for name, value in facts.items() if value is not None)
    earlier = max(len(rows) - len(timeline.results), 0)
    note = f"<p>{earlier} of the results are from an earlier process. Its times and recoveries are not known here.</p>"
    return f'<div class="facts">{shown}</div>{note if earlier else ""}'


def _metrics(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a chart of each metric. The same metric of `train`, `validate` and `test` is in one chart."""
    numbers = [scalars(row) for row in rows]
    known = all(row.get("epoch") is not None for row in rows)
    x = "epoch" if known else "report" if all(row["kind"] == "report" for row in rows) else "step"
    charts: dict[str, dict[str, list[Point]]] = {}
    for name in measured_names(numbers):
        if name in OF_SPEED:
            continue
        for row, values in zip(rows, numbers, strict=True):
            if name in values:
                prefix = next((each for each in OF_CALLS.get(row["kind"], ()) if name.startswith(each)), "")
                line = charts.setdefault(name.removeprefix(prefix), {}).setdefault(row["kind"] if prefix else name, [])
                line.append((float(row["epoch" if x == "epoch" else "step"]), values[name]))
    drawn = [_figure(name, lines, x=x) for name, lines in list(charts.items())[:MOST_CHARTS]]
    left_out = len(charts) - len(drawn)
    note = f'<p class="soft">{left_out} more metrics are in the table of results.</p>' if left_out else ""
    return f'<div class="charts">{"".join(drawn)}</div>{note}' if drawn else '<p class="none">No metrics yet.</p>'


def _figure(title: str, lines: Mapping[str, Sequence[Point]], **options: Any) -> str:
    colours = [list(OF_CALLS).index(name) if name in OF_CALLS else number for number, name in enumerate(lines)]
    named = zip(colours, lines, strict=True)
    names = [f'<span><i class="s{number % MOST_SERIES}"></i>{as_html(name)}</span>' for number, name in named]
    key = f'<p class="key">{"".join(names)}</p>' if list(lines) not in ([title], [""]) else ""
    infinite = sum(not math.isfinite(y) for line in lines.values() for _, y in line)
    note = f'<p class="key">{infinite} values are not finite, and are left out.</p>' if infinite else ""
    chart = line_chart(lines, colours=colours, **options)
    return f"<figure><h3>{as_html(title)}</h3>{key}{chart}{note}</figure>"


def _over_time(timeline: Timeline) -> str:
    timed = list(timeline.results)
    spans = [(when - row["seconds"], when) for when, row in timed]
    spans += [(each.time - each.seconds, each.time) for each in timeline.recoveries]
    spans += [(when, when) for when, *_ in timeline.pace]
    begin, end = min(spans, default=(0.0, 0.0))[0], max((end for _, end in spans), default=0.0)
    unit, of_unit = time_unit(end - begin)

    def at(when: float) -> float:
        return (when - begin) / of_unit

    trained = [(at(when), row["seconds"], scalars(row)) for when, row in timed if row["kind"] == "train"]
    between = zip(timeline.pace, timeline.pace[1:], strict=False)
    pace = [(at(b[0]), max(b[2] - a[2], 0) / (b[1] - a[1])) for a, b in between if b[1] > a[1]]
    marks = [(at(each.time), f"{each.reason}, {_number(each.seconds)} s") for each in timeline.recoveries]
    charts: dict[str, dict[str, Sequence[Point]]] = {
        "batches per second, while train() runs": {"": pace},
        "samples per second, of each train()": {
            "": [(x, values["num_samples"] / took) for x, took, values in trained if took and "num_samples" in values]
        },
        "seconds of each train(), on average over the ranks": {
            name: [(x, values[key]) for x, _, values in trained if key in values] for name, key in SECONDS.items()
        },
        "seconds per report": {
            "": [(at(when), float(row["seconds"])) for when, row in timed if row["kind"] == "report"]
        },
        WORKERS: {"": [(at(when), size) for when, size in _sizes(timeline, begin, end)]},
    }
    options: dict[str, Any] = {
        "x": f"{unit} since the start",
        "marks": marks,
        "span": (0.0, at(end)),
    }
    figures = [
        _figure(title, present, **options, from_zero=True, steps=title == WORKERS)
        for title, lines in charts.items()
        if (present := {name: line for name, line in lines.items() if line})
    ]
    dashed = '<p class="soft">The dashed lines are recoveries and other changes of the workers.</p>' if marks else ""
    return f'<div class="charts">{"".join(figures)}</div>{dashed}' if figures else ""


def _sizes(timeline: Timeline, begin: float, end: float) -> list[Point]:
    """Return the number of workers at each time when it is known."""
    changes = [(each.time, float(each.world_size_after)) for each in timeline.recoveries]
    sizes = sorted([*changes, *((when, float(row["world_size"])) for when, row in timeline.results)])
    if not sizes:
        return []
    first = timeline.recoveries[0].world_size_before if sizes[0] in changes[:1] else sizes[0][1]
    return [(begin, float(first)), *sizes, (end, sizes[-1][1])]


def _recoveries(recoveries: Sequence[Recovery]) -> str:
    if not recoveries:
        return '<p class="none">No worker failed, left or joined.</p>'
    names = [*PHASES, "other"]
    key = "".join(f'<span><i class="s{number}"></i>{name}</span>' for number, name in enumerate(names))
    head = "".join(
        f"<th>{title}</th>" for title in ("when", "epoch, batch", "reason", "ranks", "workers", "how", "seconds")
    )
    return (
        f'<p class="key">Parts of the seconds: {key}</p><div class="wide"><table><thead><tr>{head}<th>their parts</th>'
        f"<th>cause</th></tr></thead><tbody>{''.join(map(_recovery, recoveries))}</tbody></table></div>"
    )


def _recovery(each: Recovery) -> str:
    phases = {name: each.phases[name] for name in PHASES if name in each.phases}
    phases["other"] = max(each.seconds - sum(phases.values()), 0.0)
    numbers = {name: number for number, name in enumerate([*PHASES, "other"])}
    whole = sum(phases.values()) or 1.0
    bar = "".join(f'<i class="s{numbers[n]}" style="width:{100 * s / whole:.1f}%"></i>' for n, s in phases.items())
    parts = ", ".join(f"{name} {_number(took)}" for name, took in phases.items() if took >= 0.0005)
    how = "in place" if each.in_place else "from a snapshot"
    cells = (
        _time(each.time) if each.time else "",
        f"{each.epoch}, {each.batch}",
        each.reason,
        ", ".join(map(str, each.removed_ranks)),
        f"{each.world_size_before} to {each.world_size_after}",
        f"{how}, {each.batches_redone} batches redone" if each.batches_redone else how,
        _number(each.seconds),
    )
    shown = "".join(f"<td>{as_html(cell)}</td>" for cell in cells)
    return f'<tr>{shown}<td><div class="bar">{bar}</div>{parts}</td><td class="text"><pre>{as_html(each.detail)}</pre></td></tr>'


def _ranks(timeline: Timeline) -> str:
    """Return what each rank does in a batch on average. A rank's own time is that for data and computing: in the rest
    it waits for the others."""
    found = [
        (rank, sums) for rank, sums in enumerate(timeline.ranks) if SECONDS["data"] in sums and sums.get("batch_count")
    ]
    if not found:
        return (
            '<p class="none">Not measured: <code>callbacks=[Throughput()]</code> measures for how long each rank of an '
            "operator waits for data, computes and communicates.</p>"
        )
    each = {
        rank: {n: 1000 * s[name] / s["batch_count"] for n, name in SECONDS.items() if name in s} for rank, s in found
    }
    own = {rank: times.get("data", 0.0) + times.get("compute", 0.0) for rank, times in each.items()}
    usual = statistics.median_low(own.values())
    names = [name for name in SECONDS if any(name in times for times in each.values())]
    head = "".join(f"<th>{name}, ms per batch</th>" for name in names)
    note = (
        " Here, computing includes the wait for the other ranks."
        if "communication" not in names and len(own) > 1
        else ""
    )
    lines = ""
    for rank, times in each.items():
        slow = len(own) > 1 and own[rank] > SLOW * usual
        cells = "".join(f"<td>{_number(times[name]) if name in times else ''}</td>" for name in names)
        verdict = (
            f'<td class="slow">slow: {own[rank] / usual:.2g} times the median</td>' if slow and usual else "<td></td>"
        )
        lines += f"<tr><td>{rank}</td>{cells}{verdict}</tr>"
    return (
        '<p class="soft">Means of the calls of train() since the workers changed last. A rank is slow if it needs at least '
        f"{SLOW:g} times as long for data and computing as the median of the ranks.{note}</p>"
        f'<div class="wide"><table><thead><tr><th>rank</th>{head}<th></th></tr></thead><tbody>{lines}</tbody></table></div>'
    )


def _config(config: Mapping[str, Any]) -> str:
    rows = [(_masked(name), _masked(value)) for name, value in flat(config).items()]
    lines = "".join(f"<tr><td>{as_html(name)}</td><td>{as_html(value)}</td></tr>" for name, value in rows)
    return f'<div class="wide"><table><tbody>{lines}</tbody></table></div>'


def _masked(value: Any) -> Any:
    """Return a value without the secrets of a URI that is all of it, or of its items. In a text, a URI ends at a space, which a
    password can contain; so these are masked first."""
    if isinstance(value, (list, tuple)):
        items = [mask(each) if isinstance(each, str) else each for each in value]
        return tuple(items) if isinstance(value, tuple) else items
    return mask(value) if isinstance(value, str) else value


def _results(rows: Sequence[Mapping[str, Any]]) -> str:
    shown = rows[-MOST_ROWS:]
    names = list(dict.fromkeys(name for row in shown for name in row if not name.startswith("_")))
    head = "".join(f"<th>{as_html(name)}</th>" for name in names)
    cells = ["".join(f"<td>{_cell(row.get(name, ''))}</td>" for name in names) for row in shown]
    title = f"The newest {len(shown)} of {len(rows)}" if len(shown) < len(rows) else f"All {len(rows)}"
    lines = "".join(f"<tr>{line}</tr>" for line in cells)
    return (
        f'<details><summary>{title}</summary><div class="wide"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div></details>"
    )


def _cell(value: Any) -> str:
    return _number(value) if isinstance(value, float) else "" if value is None else as_html(value)[:400]
