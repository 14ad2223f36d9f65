"""The end of Keras' `fit`, which a `train()` with `epochs` in its `fit_config` has, too."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

import keras  # noqa: E402

from raysgd import ElasticConfig  # noqa: E402
from raysgd.tf import TFTrainer  # noqa: E402
from tests.tf.small import data_creator, fire, make_model  # noqa: E402


def averaging(config: dict[str, Any]) -> Any:
    return compiled(keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9))


def plain(config: dict[str, Any]) -> Any:
    return compiled(keras.optimizers.SGD(0.05))


def compiled(optimizer: Any) -> Any:
    model = make_model()
    model.compile(optimizer=optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


class Dies(keras.callbacks.Callback):  # type: ignore[name-defined,misc]
    """Kills a worker, once, before the ninth step. The other one is waiting for its gradients then."""

    def __init__(self, marks: Path) -> None:
        super().__init__()
        self.marks = marks

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if int(self.model.optimizer.iterations) == 8:
            fire("kill", str(self.marks))


class Worsens(keras.callbacks.Callback):  # type: ignore[name-defined,misc]
    """Lets the loss grow from the third epoch on."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.05 if epoch < 2 else 50.0


class Ends(keras.callbacks.Callback):  # type: ignore[name-defined,misc]
    """Notes the begins and ends of a fit."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.heard.append("begin")

    def on_train_end(self, logs: Any = None) -> None:
        self.heard.append("end" if logs and logs["loss"] > 0 else "end without a loss")


def best() -> list[Any]:
    return [Worsens(), keras.callbacks.EarlyStopping("loss", patience=2, restore_best_weights=True)]


def equal(found: Any, expected: Any) -> None:
    for one, other in zip(found.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


def test_the_best_weights_are_restored() -> None:
    model = plain({})
    model.fit(data_creator({})[0], epochs=8, callbacks=best(), verbose=0)
    with TFTrainer(plain, data_creator, {"fit_config": {"epochs": 8, "callbacks": best()}}) as trainer:
        assert trainer.train()["epoch"] < 8
        equal(trainer.get_model(), model)
        loss = model.evaluate(data_creator({})[1], verbose=0)
        assert trainer.validate()["validation_loss"] == pytest.approx(loss, rel=1e-5)


def test_averages_become_the_weights_at_the_end_of_each_fit() -> None:
    model, (data, _) = averaging({}), data_creator({})
    with TFTrainer(averaging, data_creator, {"fit_config": {"epochs": 2}}) as trainer:
        for _ in range(2):
            model.fit(data, epochs=2, verbose=0)
            trainer.train()
            equal(trainer.get_model(), model)


@pytest.mark.parametrize(
    ("fit", "heard"),
    [({"epochs": 2}, ["begin", "end", "begin", "end", "begin", "end"]), ({}, ["begin", "end"])],
)
def test_every_fit_has_one_begin_and_one_end(fit: dict[str, Any], heard: list[str]) -> None:
    ends = Ends()
    with TFTrainer(plain, data_creator, {"fit_config": {**fit, "callbacks": [ends]}}) as trainer:
        for steps in (None, 2, None, 2):  # calls with a number of steps do not end it
            trainer.train(num_steps=steps)
    assert ends.heard == heard


def test_what_needs_an_end_warns_without_one(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "raysgd"),
        TFTrainer(averaging, data_creator, {"fit_config": {"callbacks": best()}}) as trainer,
    ):
        trainer.train()
    assert "never become those of EarlyStopping(restore_best_weights=True) or Adam(use_ema=True)" in caplog.text


def weights(operator: Any) -> list[np.ndarray]:
    return [np.asarray(variable) for variable in operator.model.weights]


@pytest.mark.slow
@pytest.mark.more
@pytest.mark.elastic
def test_all_workers_end_a_fit_alike_after_a_failure(ray_cluster: None, tmp_path: Path) -> None:
    model = averaging({})
    model.fit(data_creator({})[0], epochs=2, verbose=0)
    config = {"fit_config": {"epochs": 2, "callbacks": [Dies(tmp_path)]}}
    both = ElasticConfig(min_workers=2)
    with TFTrainer(averaging, data_creator, config, num_replicas=2, elastic=both) as trainer:
        trainer.train()
        assert len(trainer.recoveries) == 1
        first, second = trainer.apply_all_operators(weights)
        assert all(map(np.array_equal, first, second))
        equal(trainer.get_model(), model)
        trainer.save(tmp_path / "averaged.ckpt")
    with TFTrainer(averaging, data_creator, {}) as loaded:
        loaded.load(tmp_path / "averaged.ckpt")
        equal(loaded.get_model(), model)
