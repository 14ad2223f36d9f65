"""The report of a run: one HTML page."""

import itertools
import math
import os
import re
import signal
import time
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from raysgd import ConfigError, ElasticConfig, RankSpeed, Recovery, Speed, TorchTrainer, train
from raysgd.callbacks import Callback, CallResult, History, Run
from tests.callbacks.recording import Line, result, underway
from tests.callbacks.test_history import filled
from tests.peek import pace_of

TAGS = "html|head|meta|title|style|body|section|h1|h2|h3|p|div|b|i|span|pre|code|figure|svg|g|path|text|circle|table|tr|th|td"
ATTRIBUTES = "lang|charset|http-equiv|content|name|class|style|viewBox|role|aria-label|d|x|y|cx|cy|r|text-anchor"


class Page:
    """A report. Refuses one that could load or run something."""

    def __init__(self, text: str) -> None:
        assert all(each in text for each in ("<!doctype html>", "prefers-color-scheme:dark", "width=device-width"))
        assert not re.search(r"https?:|@import|url\(", text)
        self.root = ElementTree.fromstring(text.removeprefix("<!doctype html>"))
        for each in self.root.iter():
            assert re.fullmatch(f"{TAGS}|details|summary", each.tag) and "nan" not in each.get("d", "")
            assert all(re.fullmatch(ATTRIBUTES, name) for name in each.attrib), each.attrib
        figures = {"".join(figure.find("h3").itertext()): figure for figure in self.root.iter("figure")}  # type: ignore[union-attr]
        self.charts = {title: len([*each.iter("circle")]) for title, each in figures.items() if [*each.iter("svg")]}
        self.lines = [each.get("d", "") for each in self.root.iterfind(".//g/path")]

    def texts(self, tag: str) -> list[str]:
        return ["".join(each.itertext()) for each in self.root.iter(tag)]

    def table(self, first: str) -> list[list[str]]:
        """Return the lines of the table whose header begins with a text."""
        tables = [[["".join(cell.itertext()) for cell in row] for row in each] for each in self.root.iter("table")]
        return next(lines[1:] for lines in tables if lines[0][0] == first)

    def changes(self) -> list[str]:
        """Return what is said about each change of the workers."""
        return [text for text in self.texts("figure") if re.search(" -> .* workers?, ", text)]


def read(path: str | Path) -> Page:
    return Page(Path(path).read_text(encoding="utf-8"))


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
    ) as trainer:
        trainer.train(info={"victim": 1})
        trainer.resize(2)
        for _ in range(2):
            trainer.train()
            trainer.validate()
        changes = trainer.recoveries
    assert [each.reason for each in changes] == ["worker death", "growth"]
    for each in changes:
        assert {"join"} <= set(each.phases) <= {"stop", "wait", "leave", "state", "setup", "join"} and all(
            took > 0 for took in each.phases.values()
        )
        assert 0 < sum(each.phases.values()) <= each.seconds + 0.001
        assert time.time() - 300 < each.time - each.seconds < each.time <= time.time()
    assert "stop" in changes[0].phases and "state" not in changes[1].phases, "the ranks share it when they join"
    page = read(trainer.report(tmp_path / "run.html"))
    assert (page.charts["loss"], page.charts["accuracy"]) == (5, 2)
    assert page.charts["samples per second, of each train()"] == 3
    assert page.charts["batches per second, while train() runs"] >= 1
    assert page.charts["workers"] == 5 + 2 * 2 + 2, "results, both ends of each change, and both ends of the time"
    over_time = [name for name in page.charts if " " in name or name == "workers"]
    assert len(page.root.findall(".//path[@class='mark']")) == 2 * len(over_time)
    failure, growth = page.changes()
    # On a busy machine, Ray may report the death before the system says how the process has ended.
    cause = "(its process (was )?ended|ActorDiedError)"
    assert re.search(rf"worker death: 2 -> 1 worker, rank 1 removed.* in place.*\n?.*{cause}", failure)
    assert "growth: 1 -> 2 workers, epoch" in growth
    _, slow = page.table("rank")
    assert float(slow[3]) > 30, "on a busy machine, the other rank may need as long"
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
    assert {HOSTILE[0], f"{HOSTILE[1]}/{HOSTILE[1]}"} <= page.charts.keys()
    assert all(each.replace("http:x", "") in page.changes()[n] for n, each in enumerate(HOSTILE[:3]))
    assert "\x00" not in text and "\ufffd" in text


def test_passwords_of_uris_in_the_config_are_masked(tmp_path: Path) -> None:
    uri = "s3://key:hidden@bucket/data"
    history = History()
    config = {"one": uri, "several": [uri, "az://host/x?sig=hidden"], "inner": {"deep": uri}, "text": "is a?b=c shown"}
    history.on_start(Run(trainer="TorchTrainer", name="x", num_workers=2, config=config))
    text = unescape(Path(history.report(tmp_path / "run.html")).read_text(encoding="utf-8"))
    assert "hidden" not in text and text.count("s3://key:***@bucket/data") == 3 and "is a?b=c shown" in text


def test_values_that_are_not_finite_interrupt_a_line(tmp_path: Path) -> None:
    values = [1.0, math.nan, 3.0, math.inf, 1.7e308, -1.7e299, 5e-324]
    rows = [result(epoch=n, step=n, metrics={"loss": value, "never": math.nan}) for n, value in enumerate(values, 1)]
    page = read(filled(*rows).report(tmp_path / "run.html"))
    assert (page.charts["loss"], page.charts["never"]) == (4, 0)
    assert "3 values are left out: not finite, or too large." in page.texts("p")
    assert (page.lines[0].count("M"), page.lines[0].count("L")) == (3, 1)


def test_a_long_line_keeps_its_extremes(tmp_path: Path) -> None:
    heights = [9.0 if n == 4321 else -9.0 if n == 777 else 0.0 for n in range(10_000)]
    history = filled(*(result(epoch=n, metrics={"loss": y}) for n, y in enumerate(heights)))
    line = read(history.report(tmp_path / "run.html")).lines[0]
    drawn = [float(point.split(" ")[1]) for point in line.split("L")]
    assert 100 < len(drawn) < 610 and min(drawn) < 30 < 80 < drawn[0] < 90 < 130 < max(drawn)


def test_before_the_first_result_and_after_a_resume(tmp_path: Path) -> None:
    empty = read(History().report(tmp_path / "run.html"))
    assert "No metrics yet." in empty.texts("p") and "workers" not in empty.charts
    history = History()
    history.on_resume(filled(result(), result(epoch=2, step=8)).rows)
    history.on_result(result(epoch=3, step=12))
    page = read(history.report(tmp_path / "run.html"))
    assert page.charts["loss"] == 3
    assert page.charts["workers"] == 3, "of this process: its result, and both ends"
    assert any(text.startswith("2 results are from an earlier process") for text in page.texts("p"))


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
    assert page.texts("h1") == ["Trainer: function"]
    assert {"1", "2", "3"} <= {*page.texts("text")}, "the axis counts reports"


def test_a_callback_can_write_a_report(tmp_path: Path) -> None:
    """As a user may after each result, with the trainer in the middle of a call."""
    written: list[int] = []

    class Reporting(Callback):
        def on_result(self, result: CallResult) -> None:
            written.append(len(read(trainer.report(tmp_path / "sub" / "run.html")).table("kind")))

    with TorchTrainer(training_operator_cls=Line, use_gpu=False, callbacks=[Reporting()]) as trainer:
        trainer.train()
        trainer.train()
    assert written == [1, 2]
    assert [path.name for path in (tmp_path / "sub").iterdir()] == ["run.html"], "no draft is left"


def test_slow_ranks(tmp_path: Path) -> None:
    history, waits = filled(result()), [0.05, 0.05, None]
    assert "Slow ranks" not in read(history.report(tmp_path / "run.html")).texts("h2")
    ranks = [RankSpeed(rank, "<a>", data_seconds=0.05 * (rank == 2), compute_seconds=0.1) for rank in range(3)]
    ranks = [replace(each, wait_seconds=wait) for each, wait in zip(ranks, waits, strict=True)]
    speed = Speed(tuple(ranks), (2,), "data", 0.3, "rank 2 on <a>: ...")
    history.on_start(Run(trainer="TorchTrainer", name="x", num_workers=3, speed=lambda: speed))
    page = read(history.report(tmp_path / "run.html"))
    assert page.table("rank") == [
        ["0", "<a>", "0", "100", "50", "1"],
        ["1", "<a>", "0", "100", "50", "1"],
        ["2", "<a>", "50", "100", "", "1.5: slow"],
    ]
    assert any("rank 2 on <a>: ..." in text for text in page.texts("p"))


def test_a_uri() -> None:
    fsspec = pytest.importorskip("fsspec")
    assert filled(result()).report("memory://report/run.html") == "memory://report/run.html"
    assert Page(fsspec.filesystem("memory").cat("/report/run.html").decode()).charts["loss"] == 1


def test_a_path_of_a_file_is_needed(tmp_path: Path) -> None:
    for wrong in (None, 3, b"run.html"):
        with pytest.raises(ConfigError, match=r"report\(\) needs the path of the HTML file"):
            History().report(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"is a directory: pass a path such as .*run\.html"):
        History().report(tmp_path)


def test_the_pace_of_a_long_run_needs_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: now[0])
    history = History()
    for _ in range(4):
        history.on_progress(underway())
        for second in range(2000):
            now[0] += 1
            history.on_progress(underway("w", batches=10 * (second + 1)))
        history.on_result(result(seconds=2000.0, metrics={"batch_count": 20_000}))
        now[0] += 500  # the script does something else
    pace = pace_of(history)
    assert 250 < len(pace) <= 1000
    (_, seconds, batches), between = pace[-1], itertools.pairwise(pace)
    assert 7980 < seconds <= 8000 and batches == 10 * seconds
    rates = {(b[2] - a[2]) / (b[1] - a[1]) for a, b in between if b[1] > a[1]}
    assert rates == {10}, "pauses between calls do not count"
