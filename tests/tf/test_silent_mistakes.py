"""Mistakes in operators for TensorFlow that raise no error by themselves."""

import logging
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

import keras  # noqa: E402

from raysgd import TFTrainer  # noqa: E402
from raysgd.errors import ConfigError  # noqa: E402
from raysgd.tf import TrainingOperator  # noqa: E402
from raysgd.tf.channel import Channel  # noqa: E402
from raysgd.tf.compiled import operator_from_creators  # noqa: E402
from tests.replicas import tf_rank  # noqa: E402
from tests.tf.small import ROWS, Small, make_data  # noqa: E402


class Uncounted(Small):
    """Returns no `num_samples`. Its last batch has one row, the others ten."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return {"train_loss": super().train_batch(batch, batch_info)["train_loss"]}

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        return {"val_accuracy": super().validate_batch(batch, batch_info)["val_accuracy"]}


def test_a_batch_without_num_samples_weighs_as_much_as_its_rows() -> None:
    with TFTrainer(training_operator_cls=Uncounted) as trainer:
        assert trainer.train()["num_samples"] == ROWS
        found = trainer.validate()
        features, labels = make_data()
        right = trainer.get_model().predict(features, verbose=0).argmax(1) == labels
    assert found["num_samples"] == ROWS and found["val_accuracy"] == pytest.approx(np.mean(right))


class ByHand(Small):
    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.criterion(y, self.model(x, training=True))
        if self.config["averaged"]:
            pairs = zip(*self.gradients(tape, loss), strict=True)
        else:
            variables = self.model.trainable_variables
            pairs = zip(tape.gradient(loss, variables), variables, strict=True)
        self.optimizer.apply_gradients(pairs)
        return {"train_loss": loss}


@pytest.mark.parametrize(("ranks", "averaged"), [(2, False), (2, True), (1, False)])
def test_gradients_that_are_applied_without_the_other_ranks_are_refused(
    ranks: int, averaged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Channel, "_packed", lambda self, tensors: tensors)  # nothing arrives from the other rank
    rank = tf_rank(ByHand, {"averaged": averaged}, ranks=ranks)
    if averaged or ranks == 1:
        assert rank.train()["batch_count"] == 11
        return
    with pytest.raises(ConfigError, match=r"gradients of this worker alone.*call self.step\(tape, loss\)"):
        rank.train()


class Divided(TrainingOperator):
    """Has a mask on the model's output, or sample weights."""

    def setup(self, config: dict[str, Any]) -> None:
        rows = np.arange(24).reshape(4, 6) % 3
        layers = [keras.layers.Embedding(3, 4, mask_zero=config["mask"]), keras.layers.Dense(3)]
        reduction = config.get("reduction", "sum_over_batch_size")
        self.model, self.optimizer, self.criterion = self.register(
            models=keras.Sequential([keras.Input((6,)), *layers]),
            optimizers=keras.optimizers.SGD(0.1),
            criterion=keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction),
        )
        weights = (rows,) if "reduction" in config else ()
        self.register_data(train_dataset=tf.data.Dataset.from_tensor_slices((rows, rows, *weights)).batch(4))


def compiled_divided() -> type[TrainingOperator]:
    """Return the operator of a compiled model like that of `Divided`."""

    def model_creator(config: dict[str, Any]) -> Any:
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.Embedding(3, 4, mask_zero=True), keras.layers.Dense(3)]
        )
        model.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    rows = np.arange(24).reshape(4, 6) % 3
    return operator_from_creators(
        model_creator, lambda config: (tf.data.Dataset.from_tensor_slices((rows, rows)).batch(4), None)
    )


@pytest.mark.parametrize(
    ("config", "ranks", "warns"),
    [
        ({"mask": True}, 2, True),
        ({"mask": True}, 1, False),
        ({"mask": False}, 2, False),
        ({"mask": False, "reduction": "mean_with_sample_weight"}, 2, True),
        ({"compiled": True}, 2, True),
    ],
)
def test_a_mean_over_other_numbers_than_the_rows_warns(
    config: dict[str, Any], ranks: int, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Channel, "_packed", lambda self, tensors: tensors)  # nothing arrives from the other rank
    operator = compiled_divided() if "compiled" in config else Divided
    rank = tf_rank(operator, config, ranks=ranks)
    with caplog.at_level(logging.WARNING, "raysgd"):
        rank.train()
    assert ("2 workers train other weights than one" in caplog.text) == warns


def two_outputs(config: dict[str, Any]) -> Any:
    x = keras.Input((1,))
    outputs = {name: keras.layers.Dense(1, use_bias=False, kernel_initializer="ones", name=name)(x) for name in "ab"}
    model = keras.Model(x, outputs)
    model.compile(keras.optimizers.SGD(0.0), loss={name: "mae" for name in outputs})
    return model


def five_rows(config: dict[str, Any]) -> Any:
    """Return batches of 4 rows and of the last one, whose losses are 0, 10, 20, 30 and 40."""
    x, y = np.zeros((5, 1), "float32"), np.arange(0, 50, 10, dtype="float32")[:, None]
    return tf.data.Dataset.from_tensor_slices((x, {"a": y, "b": y})).batch(4), None


@pytest.mark.parametrize(("rank", "ranks", "loss"), [(0, 1, 20.0), (0, 2, 50 / 3), (1, 2, 25.0)])
def test_repeated_rows_do_not_count_in_the_losses_of_outputs(
    rank: int, ranks: int, loss: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one of two ranks repeats the last row of the first one."""
    monkeypatch.setattr(Channel, "_packed", lambda self, tensors: tensors)  # nothing arrives from the other rank
    trained = tf_rank((two_outputs, five_rows), {}, rank=rank, ranks=ranks)
    assert trained.train()["train_a_loss"] == pytest.approx(loss)
