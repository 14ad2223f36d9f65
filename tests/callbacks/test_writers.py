"""What callbacks write is read back, where possible by the programs for which it is meant."""

import csv
import errno
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from raysgd import ConfigError, Recovery, TorchTrainer
from raysgd.callbacks import (
    Callback,
    CallResult,
    CSVCallback,
    JsonLinesCallback,
    JsonLoggerCallback,
    MLflowCallback,
    PrintCallback,
    Run,
    TensorBoardCallback,
    WandbCallback,
    csv_files,
    json_files,
)
from tests.callbacks.recording import Line, result, run_points


def report(step: int, **metrics: Any) -> CallResult:
    rows = [{"_timestamp": 1, "rank": rank, **metrics} for rank in (0, 1)]
    return result(kind="report", epoch=None, step=step, metrics=rows[0], by_worker=rows)


def run_callback(callback: Callback, folder: Path, *results: CallResult, config: dict[str, Any] | None = None) -> None:
    callback.on_start(Run(trainer="TorchTrainer", name="Line", num_workers=2, config=config or {}, folder=folder))
    for each in results:
        callback.on_result(each)
    callback.on_end(False)


def trained(*callbacks: Callback, folder: Path) -> list[dict[str, Any]]:
    """Train two epochs and validate once. Return the results."""
    config = {"rows": 32, "nested": {"lr": 0.1}}
    with TorchTrainer(
        training_operator_cls=Line, use_gpu=False, config=config, callbacks=callbacks, logdir=folder
    ) as trainer:
        return [trainer.train(), trainer.validate(), trainer.train()]


def test_json_lines(tmp_path: Path) -> None:
    returned = trained(JsonLinesCallback(), folder=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["epoch"], line["step"]) for line in lines] == [
        ("train", 1, 4),
        ("validate", 1, 4),
        ("train", 2, 8),
    ]
    assert lines[0]["train_loss"] == returned[0]["train_loss"]
    assert lines[1]["val_loss"] == returned[1]["val_loss"]
    run_callback(JsonLinesCallback(), tmp_path, result())
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == 4, "earlier lines stay"


class Grid:
    shape = (2, 2)

    def tolist(self) -> list[list[int]]:
        return [[1, 2], [3, 4]]


def test_json_is_strict(tmp_path: Path) -> None:
    given = {
        "loss": math.nan,
        "most": -math.inf,
        "inner": {"x": math.inf, 1: (1, 2.5)},
        "grid": Grid(),
        "path": Path("a"),
    }
    run_callback(
        JsonLinesCallback(tmp_path / "own.jsonl"), tmp_path, result(metrics={**given, "list": [None, True, "x"]})
    )
    line = json.loads((tmp_path / "own.jsonl").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert (line["loss"], line["most"], line["inner"]) == ("NaN", "-Infinity", {"x": "Infinity", "1": [1, 2.5]})
    assert (line["grid"], line["path"], line["list"]) == ([[1, 2], [3, 4]], "a", [None, True, "x"])
    assert math.isnan(float(line["loss"]))


def test_csv(tmp_path: Path) -> None:
    returned = trained(CSVCallback(), folder=tmp_path)
    with open(tmp_path / "train.csv", newline="") as file:
        train = list(csv.DictReader(file))
    assert [row["epoch"] for row in train] == ["1", "2"]
    assert [float(row["train_loss"]) for row in train] == [returned[0]["train_loss"], returned[2]["train_loss"]]
    with open(tmp_path / "validate.csv", newline="") as file:
        assert [float(row["val_loss"]) for row in csv.DictReader(file)] == [returned[1]["val_loss"]]


def test_a_metric_that_appears_later_is_a_new_column(tmp_path: Path) -> None:
    first, later = result(metrics={"a": 1}), result(metrics={"b": {"c": "x, y"}})
    run_callback(CSVCallback(tmp_path / "own"), tmp_path, first, later)
    run_callback(CSVCallback(tmp_path / "own"), tmp_path, first)
    with open(tmp_path / "own" / "train.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["a"], row["b/c"]) for row in rows] == [("1", ""), ("", "x, y"), ("1", "")]


@pytest.mark.parametrize(("which", "ranks"), [(0, [0]), ([1], [1]), (None, [0, 1])])
def test_json_as_in_v1(tmp_path: Path, which: Any, ranks: list[int]) -> None:
    callback = JsonLoggerCallback(tmp_path / "own", filename="log.json", workers_to_log=which)
    assert callback.log_path is None
    run_callback(callback, tmp_path, report(1, loss=2.0), report(2, loss=1.0))
    assert callback.log_path == tmp_path / "own" / "log.json"
    logged = json.loads(callback.log_path.read_text())
    assert [[(row["rank"], row["loss"]) for row in rows] for rows in logged] == [
        [(rank, loss) for rank in ranks] for loss in (2.0, 1.0)
    ]


def test_json_as_in_v1_keeps_what_an_earlier_run_has_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "results.json"
    for steps in ((1, 2), (3,)):
        run_callback(JsonLoggerCallback(), tmp_path, *(report(step, at=step, loss=math.nan) for step in steps))
    assert [(row["at"], row["loss"]) for (row,) in json.loads(path.read_text())] == [(at, "NaN") for at in (1, 2, 3)]
    path.write_text('[[{"at": NaN}]]')  # as v1 wrote it
    run_callback(JsonLoggerCallback(), tmp_path, report(2, at=2))
    assert [row["at"] for (row,) in json.loads(path.read_text())] == ["NaN", 2]
    assert not caplog.messages
    for damaged in ('[[{"at": 1}], [{"a', '{"at": 1}', "\0\0\0"):
        path.write_text(damaged)
        run_callback(JsonLoggerCallback(), tmp_path, report(2, at=2))
        assert [row["at"] for (row,) in json.loads(path.read_text())] == [2]
        (kept,) = tmp_path.glob("results.json.kept-*")
        assert kept.read_text() == damaged
        assert caplog.messages.pop().startswith(f"{path} is not a list in JSON. It is kept as {kept}")
        kept.unlink()


def unreadable(path: Path) -> bytes:
    raise OSError(errno.EIO, "Input/output error")


def test_json_as_in_v1_does_not_replace_what_it_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callback, path = JsonLoggerCallback(), tmp_path / "results.json"
    run_callback(callback, tmp_path, report(1))
    before = path.read_text()
    with monkeypatch.context() as failing:
        failing.setattr(Path, "read_bytes", unreadable)
        with pytest.raises(OSError, match="Input/output"):
            run_callback(callback, tmp_path)
    callback.on_result(report(2))
    assert path.read_text() == before


@pytest.mark.parametrize("wrong", [-1, [], [True], ["0"]])
def test_invalid_ranks_are_refused(wrong: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        JsonLoggerCallback(workers_to_log=wrong)


def test_the_log_says_once_where_callbacks_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for callbacks in ([], [CSVCallback()]):
        with TorchTrainer(training_operator_cls=Line, use_gpu=False, callbacks=callbacks) as trainer:
            trainer.fit(2)
    assert caplog.messages == [f"callbacks write to {trainer.logdir}"]
    assert trainer.logdir.is_relative_to(tmp_path) and (trainer.logdir / "train.csv").exists()


def test_points_within_a_call(tmp_path: Path) -> None:
    """Nothing else than `train` has them, and a call of fewer batches has none."""
    every: Any = {"log_every": 2}
    for callback in (JsonLinesCallback(**every), CSVCallback(**every), JsonLinesCallback("without.jsonl")):
        run_points(callback, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [(row["kind"], row["step"], row["loss"]) for row in lines] == [("batch", 12, 0.5), ("batch", 15, 0.25)]
    with open(tmp_path / "batch.csv", encoding="utf-8") as file:
        assert [(row["step"], row["world_size"]) for row in csv.DictReader(file)] == [("12", "3"), ("15", "3")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["batch.csv", "history.jsonl"]
    with pytest.raises(ConfigError, match="log_every must be"):
        CSVCallback(log_every=0)


def test_printing() -> None:
    out = io.StringIO()
    callback = PrintCallback(file=out)
    callback.on_result(result(metrics={"epoch": 1, "num_samples": 32, "train_loss": 0.51234, "last_train_loss": 9.0}))
    callback.on_result(report(3, loss=0.25, a={"b": 1, "c": {"d": 2.5}}, text="x", yes=True, none=None, list=[1]))
    callback.on_recovery(
        Recovery(
            reason="worker death",
            removed_ranks=(1,),
            world_size_before=2,
            world_size_after=1,
            in_place=True,
            batches_redone=0,
            seconds=0.04,
            epoch=2,
        )
    )
    callback.on_error(ZeroDivisionError("planned\nwith a second line"))
    PrintCallback(["train_loss"], file=out).on_result(result())
    assert out.getvalue().splitlines() == [
        "train     epoch 1  2 workers  1.5 s  train_loss=0.5123",
        "report    report 3  2 workers  1.5 s  rank=0  loss=0.25  a/b=1  a/c/d=2.5  yes=1",
        "worker death  epoch 2  2 -> 1 worker  0.0 s",
        "failed: ZeroDivisionError: planned",
        "train     epoch 1  2 workers  1.5 s  train_loss=0.5",
    ]


@pytest.mark.parametrize(
    ("arguments", "given", "lines"),
    [
        ({}, {}, 3),
        ({}, {"progress": False}, 0),
        ({"use_tqdm": True}, {}, 0),
        ({"callbacks": [PrintCallback(["train_loss"])]}, {}, 0),
    ],
)
def test_fit_prints_a_line_for_each_epoch_unless_a_callback_does(
    arguments: dict[str, Any], given: dict[str, Any], lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with TorchTrainer(training_operator_cls=Line, use_gpu=False, **arguments) as trainer:
        trainer.fit(3, validate_every=2, **given)
        trainer.train()  # which returns what it has measured, and prints nothing
    found = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(("train", "validate"))]
    assert len(found) == lines
    for epoch, line in enumerate(found, start=1):
        validated = r"  val_loss=\S+  val_accuracy=\S+" if epoch == 2 else ""
        assert re.fullmatch(rf"epoch {epoch}/3  \d+\.\d s  train_loss=\S+{validated}  [\d,]+ samples/s", line), line


@pytest.mark.parametrize(
    ("callback", "package"),
    [(TensorBoardCallback, "tensorboard"), (MLflowCallback, "mlflow"), (WandbCallback, "wandb")],
)
def test_a_missing_package_names_the_extra(
    callback: Any, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blocked(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("raysgd.callbacks.writers.import_module", blocked)
    with pytest.raises(ImportError, match=rf"{callback.__name__} needs {package}: pip install 'raysgd\[{package}\]'"):
        callback().on_start(Run(trainer="T", name="n", num_workers=1, folder=tmp_path))


def test_a_line_that_was_cut_off_is_not_continued(tmp_path: Path) -> None:
    for end in ('{"kind": "tr', '{"kind": "train"}'):
        (tmp_path / "history.jsonl").write_text('{"kind": "validate"}\n' + end)
        run_callback(JsonLinesCallback(), tmp_path, result())
        lines = [json.loads(line)["kind"] for line in (tmp_path / "history.jsonl").read_text().splitlines()]
        assert lines == ["validate", *(["train"] if end.endswith("}") else []), "train"]
    for cut in ('7,"half', "7"):
        (tmp_path / "train.csv").write_text(f"step,text\r\n3,whole\r\n{cut}", newline="")
        run_callback(CSVCallback(), tmp_path, result(metrics={"text": "a, b"}), result(step=8, metrics={"text": "c"}))
        with open(tmp_path / "train.csv", newline="") as file:
            assert [(row["step"], row["text"]) for row in csv.DictReader(file)] == [
                ("3", "whole"),
                ("4", "a, b"),
                ("8", "c"),
            ]


class FullDisk(io.StringIO):
    """Stands for a file on a disk that becomes full: half of a row is written."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def write(self, text: str) -> int:
        with open(self._path, "a", newline="") as file:
            file.write(text[: len(text) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("callback", "module", "name"),
    [(JsonLinesCallback, json_files, "history.jsonl"), (CSVCallback, csv_files, "train.csv")],
)
def test_a_line_that_did_not_fit_on_the_disk_does_not_take_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, callback: type[Any], module: Any, name: str
) -> None:
    def write(*steps: int) -> None:
        for step in steps:
            writer.on_result(result(step=step, metrics={"text": 20 * "a\n"}))

    writer = callback()
    writer.on_start(Run(trainer="TorchTrainer", name="Line", num_workers=2, config={}, folder=tmp_path))
    write(1, 2)
    with monkeypatch.context() as full, pytest.raises(OSError, match="No space left"):
        full.setattr(module, "open", lambda path, *_, **__: FullDisk(path), raising=False)
        write(3)
    write(4, 5)
    with open(tmp_path / name, newline="") as file:
        rows = [json.loads(line) for line in file] if name.endswith("jsonl") else list(csv.DictReader(file))
    assert [(int(row["step"]), row["text"]) for row in rows] == [(step, 20 * "a\n") for step in (1, 2, 4, 5)]


def test_a_cell_that_was_cut_off_after_a_newline_is_not_continued(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text('step,text\r\n3,whole\r\n7,"two\r\n', newline="")
    run_callback(CSVCallback(), tmp_path, result(metrics={"text": "a"}))
    with open(tmp_path / "train.csv", newline="") as file:
        assert [(row["step"], row["text"]) for row in csv.DictReader(file)] == [("3", "whole"), ("4", "a")]


def test_csv_does_not_read_what_it_has_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    callback, reads = CSVCallback(), list[Path]()
    read = csv_files._read
    monkeypatch.setattr(csv_files, "_read", lambda path: reads.append(path) or read(path))  # type: ignore[func-returns-value]
    run_callback(callback, tmp_path, *(result(step=step) for step in range(5)))
    assert len((tmp_path / "train.csv").read_text().splitlines()) == 6
    assert len(reads) == 1


@pytest.mark.parametrize("kind", [TensorBoardCallback, MLflowCallback, WandbCallback])
def test_the_worker_to_log_is_checked(kind: type[Any]) -> None:
    for wrong in (-1, True, [0]):
        with pytest.raises(ConfigError, match="worker_to_log must be one rank"):
            kind(worker_to_log=wrong)
