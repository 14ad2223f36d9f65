"""The report of a run: one HTML page, read back with Python's HTML parser."""

import math
import os
import re
import signal
import time
from collections import Counter
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from raysgd import ConfigError, ElasticConfig, Recovery, TorchTrainer, train
from raysgd.callbacks import Callback, History, Result, Run, Throughput, Underway
from raysgd.callbacks.charts import line_chart, ticks
from raysgd.callbacks.timeline import MOST_POINTS, Timeline
from raysgd.core.policy import PHASES
from raysgd.core.progress import Progress
from raysgd.train import DataParallelTrainer, RunConfig, ScalingConfig
from tests.callbacks.recording import Line
from tests.callbacks.test_history import filled, result

ALONE = {"meta", "circle", "path", "!doctype"}
ALLOWED = {"html", "head", "meta", "title", "style", "body", "section", "h1", "h2", "h3", "p", "div", "b", "i", "span"}
ALLOWED |= {"figure", "svg", "g", "path", "text", "circle", "table", "thead", "tbody", "tr", "th", "td", "pre", "code"}
ALLOWED |= {"details", "summary"}
ATTRIBUTES = {"lang", "charset", "http-equiv", "content", "name", "class", "style", "viewbox", "role", "aria-label"}
ATTRIBUTES |= {"d", "x", "y", "cx", "cy", "r", "text-anchor"}


class Page(HTMLParser):
    """Reads a report, and fails on anything that could load or run something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.tables: list[list[list[str]]] = []
        self.charts: dict[str, int] = {}
        self.marks = 0
        self.feed(text)
        self.close()
        assert self.open == [], "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in ALLOWED and {name for name, _ in attrs} <= ATTRIBUTES, (tag, attrs)
        assert "url(" not in str(attrs) and "nan" not in str(dict(attrs).get("d"))
        if tag not in ALONE or (tag == "circle" or "mark" in dict(attrs).values()):
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "figure":
            self.charts[""] = 0
        elif tag == "circle":
            self.charts[next(reversed(self.charts))] += 1
        self.marks += tag == "path" and dict(attrs).get("class") == "mark"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag == "path", tag
        self.marks += dict(attrs).get("class") == "mark"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))
        if "h3" in self.open:
            self.charts.pop("", None)
            self.charts[data] = 0
        if self.tables and {"td", "th"} & {*self.open}:
            self.tables[-1][-1][-1] += data

    def table(self, first: str) -> list[list[str]]:
        """Return the lines of the table whose header begins with a text."""
        return next(lines[1:] for lines in self.tables if lines[0][0] == first)


def read(path: str | Path) -> Page:
    text = Path(path).read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and "prefers-color-scheme:dark" in text
    assert "http:" not in text and "https:" not in text and "@import" not in text
    return Page(text)


class Slow(Line):
    """One rank dies in a batch if `info` says so, and one needs longer than the other."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        if self.world_rank == batch_info.get("victim") and batch_info["batch_idx"] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.03 if self.world_rank == 1 else 0.0)
        return super().train_batch(batch, batch_info)


@pytest.mark.elastic
def test_report_of_a_run_with_a_failure(ray_cluster: None, tmp_path: Path) -> None:
    with TorchTrainer(
        training_operator_cls=Slow,
        num_workers=2,
        use_gpu=False,
        config={"rows": 256, "store": "s3://user:secret@host/bucket"},
        elastic=ElasticConfig(grow="epoch"),
        callbacks=[Throughput()],
    ) as trainer:
        trainer.train(info={"victim": 1})
        trainer.resize(2)
        for _ in range(2):
            trainer.train()
            trainer.validate()
        changes = trainer.recoveries
    assert [each.reason for each in changes] == ["worker death", "growth"]
    for each in changes:
        assert {"join"} <= set(each.phases) <= set(PHASES) and all(took > 0 for took in each.phases.values())
        assert 0 < sum(each.phases.values()) <= each.seconds + 0.001
        assert time.time() - 300 < each.time - each.seconds < each.time <= time.time()
    assert "stop" in changes[0].phases and "state" in changes[1].phases
    page = read(trainer.report(tmp_path / "run.html"))
    assert (page.charts["loss"], page.charts["accuracy"]) == (5, 2)
    assert page.charts["samples per second, of each train()"] == 3
    assert page.charts["batches per second, while train() runs"] >= 1
    assert page.charts["workers"] == 5 + 2 + 2, "results, changes, and both ends"
    assert page.marks == 2 * sum(name in page.charts for name in page.charts if " " in name or name == "workers")
    failure, growth = page.table("when")
    assert failure[2:6] == ["worker death", "1", "2 to 1", "in place"] and "SIGKILL" in failure[8]
    assert growth[2:5] == ["growth", "", "1 to 2"]
    quick, slow = page.table("rank")
    assert "slow" in slow[-1] and quick[-1] == "" and float(slow[2]) > 30 > float(quick[2])
    assert [cells[:2] for cells in page.table("kind")] == [
        ["train", "1"], ["train", "2"], ["validate", "2"], ["train", "3"], ["validate", "3"]
    ]  # fmt: skip
    assert "secret" not in Path(tmp_path / "run.html").read_text()


HOSTILE = [
    '</script><script>alert("1")</script>',
    "\"' onload='x' x=\"",
    "<img src=http:x onerror=y>",
    "\x00\ud800<!--",
    "&lt;",
]


def test_hostile_names_and_errors_are_only_text(tmp_path: Path) -> None:
    history = History()
    history.on_start(Run(trainer=HOSTILE[0], name=HOSTILE[2], num_workers=2, config={text: text for text in HOSTILE}))
    for text in HOSTILE:
        history.on_result(result(metrics={f"train_{text}": 1.0, text: {text: 2}, f"note{text}": text}))
        history.on_recovery(Recovery(text, (1,), 2, 1, True, 0, 0.1, detail=f"{text}\n{text}", time=time.time()))
    history.on_result(result(kind="validate", metrics={"val_" + HOSTILE[0]: 3.0}))
    path = history.report(tmp_path / "run.html")
    text = Path(path).read_text(encoding="utf-8").replace("http:x", "")
    page = Page(text)
    titles = [name for name in page.charts]
    assert HOSTILE[0] in titles and f"{HOSTILE[1]}/{HOSTILE[1]}" in titles
    assert [cells[2] for cells in page.table("when")][:3] == [each.replace("http:x", "") for each in HOSTILE[:3]]
    assert "\x00" not in text and "\ufffd" in text


def test_secrets_of_uris_are_masked_wherever_they_are(tmp_path: Path) -> None:
    uri = "s3://key:hidden@bucket/data"
    texts = [
        uri,
        f"reads {uri}, then https://store/x?token=hidden&X-Amz-Signature=hidden.",
        f"{uri},{uri},abfs://c@account/x,{uri}",
        f"simplecache::{uri}?secret=hidden",
        "jdbc:postgresql://user:hid'den@host/db",
        "https://hidden@host/x",
        "Max retries exceeded with url: /run?sv=1&X-Amz-Signature=hidden (Caused by ...)",
    ]
    config = {
        "text": texts[1],
        "list": [*texts, "s3://key:hid den@bucket"],
        "inner": [[uri], {uri: uri}],
        uri: {uri: 1},
    }
    history = History()
    history.on_start(Run(trainer="TorchTrainer", name=texts[1], num_workers=2, config=config))
    history.on_result(result(metrics={f"train_{uri}": 1.0, "note": texts[1], "long": 380 * "x" + " " + uri}))
    detail = "\n".join([*texts, 19_960 * "x" + " " + uri])
    history.on_recovery(Recovery("worker death", (1,), 2, 1, True, 0, 0.1, detail=detail, time=time.time()))
    text = unescape(Path(history.report(tmp_path / "run.html")).read_text(encoding="utf-8"))
    assert not re.search("hid ?'?den", text), re.findall(".{40}hid ?'?den", text)
    assert text.count("key:***@bucket/data") > 15 and "account/x" in text and ", then https://store/x?token=***" in text


def test_values_that_are_not_finite_interrupt_a_line(tmp_path: Path) -> None:
    values = [1.0, math.nan, 3.0, math.inf, 1.7e308, -1.7e308, 5e-324]
    rows = [result(epoch=n, step=n, metrics={"loss": value, "never": math.nan}) for n, value in enumerate(values, 1)]
    page = read(filled(*rows).report(tmp_path / "run.html"))
    assert (page.charts["loss"], page.charts["never"]) == (5, 0)
    assert ("p", "2 values are not finite, and are left out.") in page.texts
    line = line_chart({"a": [(1, 1.0), (2, math.nan), (3, 2.0), (4, 3.0)]}, x="step").partition('<g class="s0">')[2]
    assert (line.count("M"), line.count("L")) == (2, 1)


def test_before_the_first_result_and_after_a_resume(tmp_path: Path) -> None:
    empty = read(History().report(tmp_path / "run.html"))
    assert ("p", "No metrics yet.") in empty.texts and "workers" not in empty.charts
    history = History()
    history.on_resume(filled(result(), result(epoch=2, step=8)).rows)
    history.on_result(result(epoch=3, step=12))
    page = read(history.report(tmp_path / "run.html"))
    assert page.charts["train_loss".removeprefix("train_")] == 3
    assert page.charts["workers"] == 3, "of this process: its result, and both ends"
    assert any(text.startswith("2 of the results are from an earlier process") for _, text in page.texts)


def test_report_of_a_training_function(ray_cluster: None, tmp_path: Path) -> None:
    def function() -> None:
        for number in range(3):
            train.report(loss=1 / (1 + number), report=100 * number)

    trainer = train.Trainer("torch", num_workers=1, logdir=tmp_path)
    trainer.start()
    trainer.run(function)
    trainer.shutdown()
    page = read(trainer.history.report(tmp_path / "run.html"))
    assert (page.charts["loss"], page.charts["seconds per report"]) == (3, 3)
    assert ("h1", "Trainer: function") in page.texts
    assert {"1", "2", "3"} <= {text for tag, text in page.texts if tag == "text"}, "the axis counts reports"

    fitted = DataParallelTrainer(
        function, scaling_config=ScalingConfig(num_workers=1), run_config=RunConfig(storage_path=str(tmp_path))
    )
    fitted.fit()
    page = read(fitted.history.report(tmp_path / "fitted.html"))
    assert (page.charts["loss"], page.charts["workers"]) == (3, 5)


class Reporting(Callback):
    """Writes a report after each result, as a user may, with the trainer in the middle of a call."""

    trainer: Any = None
    written: list[int]

    def on_result(self, result: Result) -> None:
        path = self.trainer.report(result.metrics["path"])
        self.written = [*getattr(self, "written", []), len(read(path).table("kind"))]


def test_a_callback_can_write_a_report(tmp_path: Path) -> None:
    class Named(Line):
        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            return {**super().train_batch(batch, batch_info), "path": str(tmp_path / "sub" / "run.html")}

    reporting = Reporting()
    with TorchTrainer(training_operator_cls=Named, use_gpu=False, callbacks=[reporting]) as trainer:
        reporting.trainer = trainer
        trainer.train()
        trainer.train()
    assert reporting.written == [1, 2]
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["run.html"], "no draft is left"


def test_ranks_whose_communication_is_not_measured(tmp_path: Path) -> None:
    ranks = [{"batch_count": 10, "data_seconds": wait, "compute_seconds": 1.0} for wait in (0.0, 0.0, 0.5)]
    history = filled(result(by_worker=ranks, world_size=3), result(by_worker=ranks[:2], world_size=3))
    page = read(history.report(tmp_path / "run.html"))
    assert [cells for cells in page.table("rank")] == [
        ["0", "0", "100", ""],
        ["1", "0", "100", ""],
        ["2", "50", "100", "slow: 1.5 times the median"],
    ], "a call in which the workers changed does not count"
    assert any("computing includes the wait for the other ranks" in text for _, text in page.texts)
    history.on_recovery(Recovery("shrink", (2,), 3, 2, True, 0, 0.1))
    assert any(text.startswith("Not measured") for _, text in read(history.report(tmp_path / "run.html")).texts)


def test_a_uri() -> None:
    fsspec = pytest.importorskip("fsspec")
    assert filled(result()).report("memory://report/run.html") == "memory://report/run.html"
    assert Page(fsspec.filesystem("memory").cat("/report/run.html").decode()).charts["loss"] == 1


@pytest.mark.parametrize("wrong", [None, 3, b"run.html"])
def test_a_path_is_needed(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"report\(\) needs the path of the HTML file"):
        History().report(wrong)


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is a directory: pass a path such as .*run\.html"):
        History().report(tmp_path)


def test_the_pace_of_a_long_run_needs_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: now[0])
    timeline = Timeline()
    for _ in range(4):
        timeline.see_progress(Underway(kind="train", worker="", progress=Progress()))
        for second in range(2000):
            now[0] += 1
            timeline.see_progress(Underway(kind="train", worker="w", progress=Progress(batches=10 * (second + 1))))
        timeline.see_result(result(seconds=2000.0, metrics={"batch_count": 20_000}), {})
        now[0] += 500  # the script does something else
    assert MOST_POINTS / 4 < len(timeline.pace) <= MOST_POINTS
    (_, seconds, batches), between = timeline.pace[-1], zip(timeline.pace, timeline.pace[1:], strict=False)
    assert 7980 < seconds <= 8000 and batches == 10 * seconds
    assert {(b[2] - a[2]) / (b[1] - a[1]) for a, b in between if b[1] > a[1]} == {10}, (
        "pauses between calls do not count"
    )


@pytest.mark.parametrize(
    ("low", "high", "whole", "expected"),
    [
        (0.0, 7.3, False, [0, 2, 4, 6, 8]),
        (1, 3, True, [1, 2, 3]),
        (5.0, 5.0, False, [4.5, 5.0, 5.5]),
        (5, 5, True, [5]),
        (-0.011, 0.02, False, [-0.02, -0.01, 0.0, 0.01, 0.02]),
    ],
)
def test_ticks(low: float, high: float, whole: bool, expected: list[float]) -> None:
    assert ticks(low, high, whole=whole) == expected


def test_a_long_line_keeps_its_extremes() -> None:
    line = [(float(n), 9.0 if n == 4321 else -9.0 if n == 777 else 0.0) for n in range(10_000)]
    drawn = line_chart({"a": line}, x="step")
    assert Counter(drawn)["L"] < 610
    heights = [float(each.split(" ")[-1].split('"')[0]) for each in drawn.partition('<g class="s0">')[2].split("L")[1:]]
    assert (min(heights), max(heights)) == (pytest.approx(10, abs=10), pytest.approx(166, abs=10))
