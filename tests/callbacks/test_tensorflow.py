"""The TensorFlow trainer calls callbacks in the same way: with one result for each epoch of a call."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorflow")

from raysgd import ConfigError, TFTrainer
from raysgd.callbacks import TorchProfilerCallback
from tests.callbacks.recording import Heard
from tests.callbacks.test_report import read
from tests.peek import pace_of
from tests.tf.small import data_creator, model_creator


def test_every_epoch_of_a_call_is_a_result() -> None:
    import keras

    class Ends(keras.callbacks.Callback):  # type: ignore[name-defined,misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = epoch == 1

    heard = Heard()
    config = {"fit_config": {"epochs": 5, "callbacks": [Ends()]}}
    with TFTrainer(model_creator, data_creator, config, callbacks=[heard]) as trainer:
        last = trainer.train()
        checked = trainer.validate()
        assert repr(trainer) == "TFTrainer(CompiledModel, 1 worker, epoch 2, idle)"
    assert heard.order == ["start", "result", "result", "result", "end"]
    results = heard.named("result")
    assert [(each.kind, each.epoch, each.step) for each in results] == [
        ("train", 1, 6),
        ("train", 2, 12),
        ("validate", 2, 12),
    ]
    assert results[1].metrics == last
    assert results[2].metrics == checked
    assert [row["kind"] for row in trainer.history] == ["train", "train", "validate"]
    assert all("stop_training" not in row for each in results for row in each.by_worker)


def test_the_report_works_with_keras(tmp_path: Path) -> None:
    with TFTrainer(model_creator, data_creator, {"fit_config": {"epochs": 3}}) as trainer:
        trainer.train()
        trainer.validate()
    page = read(trainer.report(tmp_path / "run.html"))
    assert (page.charts["loss"], page.charts["samples per second, of each train()"]) == (4, 3)
    assert len(page.table("rank")) == 1
    seconds = sum(row["seconds"] for row in trainer.history.of("train"))
    assert pace_of(trainer.history)[-1][1] <= seconds, "no second counts twice"


def test_what_needs_torch_is_refused() -> None:
    with pytest.raises(ConfigError, match="TorchProfilerCallback works with PyTorch only: pass it to a TorchTrainer"):
        TFTrainer(model_creator, data_creator, callbacks=[TorchProfilerCallback()])
