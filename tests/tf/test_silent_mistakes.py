"""Mistakes in operators for TensorFlow that raise no error by themselves."""

from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from raysgd import TFTrainer  # noqa: E402
from raysgd.errors import ConfigError  # noqa: E402
from raysgd.tf.channel import Channel  # noqa: E402
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
