"""The table of results: as rows, as a DataFrame, as a figure, printed, and in a notebook."""

import math
import tracemalloc
from pathlib import Path

import pytest

from raysgd import TorchTrainer
from raysgd.callbacks import CallResult, History
from tests.callbacks.recording import Line, result


def filled(*results: CallResult) -> History:
    history = History()
    for each in results:
        history.on_result(each)
    return history


def test_rows_of_a_trainer() -> None:
    with TorchTrainer(training_operator_cls=Line, use_gpu=False) as trainer:
        returned = [trainer.train(), trainer.validate(), trainer.train()]
        history = trainer.history
    assert [row["kind"] for row in history] == ["train", "validate", "train"]
    assert [row["epoch"] for row in history] == [1, 1, 2]
    assert history.column("train_loss") == [returned[0]["train_loss"], None, returned[2]["train_loss"]]
    assert history.of("train").column("train_loss") == [returned[0]["train_loss"], returned[2]["train_loss"]]
    assert history.of("train").column("val_loss") == []
    assert [row["val_loss"] for row in history.of("validate")] == [returned[1]["val_loss"]]
    assert history[-1]["num_samples"] == 32
    assert set(history[0]) == {"kind", "epoch", "step", "world_size", "seconds", *returned[0]}
    history.rows[0]["train_loss"] = -1
    assert history[0]["train_loss"] == returned[0]["train_loss"], "rows are copies"


def test_a_look_at_the_newest_rows_copies_no_others() -> None:
    history = filled(*[result(step=step) for step in range(5000)])
    tracemalloc.start()
    try:
        newest, last_two = history[-1], history[-2:]
        taken = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (newest["step"], [row["step"] for row in last_two]) == (4999, [4998, 4999])
    assert taken < 20_000, "a copy of all rows takes more than 1 MB"
    for row in (newest, *last_two, *history):
        row["step"] = -1
    assert [row["step"] for row in history] == list(range(5000)), "rows are copies"


def test_metrics_with_the_names_of_fields_are_renamed() -> None:
    (row,) = filled(result(metrics={"step": 7, "seconds": 3, "epoch": 1}))
    assert row["step"] == 4
    assert (row["reported_step"], row["reported_seconds"]) == (7, 3)
    assert "reported_epoch" not in row
    (row,) = filled(result(epoch=None, metrics={"epoch": "last"}))
    assert (row["epoch"], row["reported_epoch"]) == (None, "last")


def test_dataframe() -> None:
    pytest.importorskip("pandas")
    history = filled(result(), result(kind="validate", metrics={"val_loss": 0.25}))
    frame = history.to_dataframe()
    assert list(frame.columns) == ["kind", "epoch", "step", "world_size", "seconds", "train_loss", "val_loss"]
    assert frame["train_loss"][0] == 0.5
    assert math.isnan(frame["train_loss"][1])
    assert list(History().to_dataframe().columns) == ["kind", "epoch", "step", "world_size", "seconds"]


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    losses = [3.0, 2.0, 1.5]
    history = filled(
        *[result(epoch=epoch, metrics={"train_loss": loss}) for epoch, loss in enumerate(losses, 1)],
        result(kind="validate", epoch=3, metrics={"val_loss": 2.5, "note": "text"}),
    )
    figure = history.plot(path=tmp_path / "curves.png")
    train, validation = figure.axes
    assert (train.get_ylabel(), validation.get_ylabel()) == ("train_loss", "val_loss")
    (line,) = train.get_lines()
    assert [list(line.get_xdata()), list(line.get_ydata())] == [[1, 2, 3], losses]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert figure._repr_png_().startswith(b"\x89PNG"), "notebooks can show it"
    assert [axes.get_ylabel() for axes in history.plot("val_loss").axes] == ["val_loss"]
    by_step = filled(result(epoch=None, kind="report", metrics={"loss": 1.0})).plot(["loss"])
    assert by_step.axes[-1].get_xlabel() == "step"


def test_plotting_an_unknown_metric() -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match=r"nothing to plot for accuracy.*are train_loss|accuracy"):
        filled(result()).plot("accuracy")
    with pytest.raises(ValueError, match="measured are none yet"):
        History().plot()


def test_printed_and_in_a_notebook() -> None:
    assert repr(History()) == "History: no results yet"
    history = filled(
        result(metrics={"train_loss": 0.123456, "last_train_loss": 9.0, "_timestamp": 5}),
        result(kind="validate", epoch=None, metrics={"val_loss": 2.5}),
    )
    assert repr(history).splitlines() == [
        "    kind  epoch  step  world_size  seconds  train_loss  val_loss",
        "   train      1     4           2      1.5      0.1235          ",
        "validate            4           2      1.5                   2.5",
    ]
    page = history._repr_html_()
    assert "<th>train_loss</th>" in page
    assert "<td>0.1235</td>" in page


def test_text_is_escaped_in_a_notebook() -> None:
    assert "<script>" not in filled(result(metrics={"note": "<script>"}))._repr_html_()
