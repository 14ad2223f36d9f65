"""The accuracy of a default validation, against that of Keras."""

from typing import Any

import pytest

tf = pytest.importorskip("tensorflow")

import keras  # noqa: E402
import numpy as np  # noqa: E402

from raysgd.tf import TFTrainer  # noqa: E402
from tests.tf.small import Small, make_data  # noqa: E402

ROWS, CLASSES = make_data()
ONE_HOT, FIRST = np.eye(3, dtype="float32")[CLASSES], (CLASSES == 0).astype("float32")[:, None]
CASES: dict[str, tuple[Any, str | None, Any, Any, float]] = {
    "numbers": (3, None, keras.losses.SparseCategoricalCrossentropy(from_logits=True), CLASSES, 0.5),
    "a column of numbers": (
        3,
        None,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        CLASSES[:, None],
        0.5,
    ),
    "one-hot": (3, None, keras.losses.CategoricalCrossentropy(from_logits=True), ONE_HOT, 0.5),
    "two classes": (1, None, keras.losses.BinaryCrossentropy(from_logits=True), FIRST, 0.0),
    "probabilities": (1, "sigmoid", keras.losses.BinaryCrossentropy(), FIRST, 0.5),
}


class Classes(Small):
    def setup(self, config: dict[str, Any]) -> None:
        outputs, activation, loss, targets, _ = CASES[config["case"]]
        keras.utils.set_random_seed(3)
        self.model, self.optimizer, self.criterion = self.register(
            models=keras.Sequential([keras.layers.Dense(outputs, activation=activation)]),
            optimizers=keras.optimizers.Adam(0.01),
            criterion=loss,
        )
        data = tf.data.Dataset.from_tensor_slices((ROWS, targets)).batch(10)
        self.register_data(train_dataset=data, validation_dataset=data)


@pytest.mark.parametrize("case", CASES)
def test_the_accuracy_is_that_of_keras(case: str) -> None:
    *_, targets, threshold = CASES[case]
    with TFTrainer(training_operator_cls=Classes, config={"case": case}) as trainer:
        trainer.train()
        found, outputs = trainer.validate()["val_accuracy"], np.asarray(trainer.predict(ROWS))
    right = (
        (outputs > threshold) == (targets > 0.5)
        if outputs.shape[-1] == 1
        else outputs.argmax(-1) == (targets.argmax(-1) if targets.shape[-1] == 3 else targets.ravel())
    )
    assert 0.1 < found < 1 and found == pytest.approx(right.mean(), abs=1e-6)


class Regression(Small):
    def setup(self, config: dict[str, Any]) -> None:
        self.model, self.optimizer, self.criterion = self.register(
            models=keras.Sequential([keras.layers.Dense(1)]),
            optimizers=keras.optimizers.Adam(0.01),
            criterion=keras.losses.MeanSquaredError(),
        )
        data = tf.data.Dataset.from_tensor_slices((ROWS, FIRST[:, 0] * 0)).batch(10)  # the class of a single column
        self.register_data(train_dataset=data, validation_dataset=data)


class SeveralOutputs(Small):
    def setup(self, config: dict[str, Any]) -> None:
        given = keras.Input((8,))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model, self.optimizer, self.criterion = self.register(
            models=keras.Model(given, [keras.layers.Dense(3)(given), keras.layers.Dense(1)(given)]),
            optimizers=keras.optimizers.Adam(0.01),
            criterion=lambda y, output: loss(y["class"], output[0]) + tf.reduce_mean((y["first"] - output[1]) ** 2),
        )
        targets = {"class": CLASSES, "first": FIRST}
        data = tf.data.Dataset.from_tensor_slices((ROWS, targets)).batch(10)
        self.register_data(train_dataset=data, validation_dataset=data)


@pytest.mark.parametrize("operator", [Regression, SeveralOutputs])
def test_the_accuracy_is_0_where_it_has_no_meaning(operator: type[Small]) -> None:
    with TFTrainer(training_operator_cls=operator) as trainer:
        trainer.train()
        found = trainer.validate()
    assert found["val_accuracy"] == 0.0 and found["val_loss"] > 0
