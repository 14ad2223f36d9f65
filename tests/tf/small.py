"""A small problem for TFTrainer, and faults in it by (rank, step), each of which occurs once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from raysgd.tf import TrainingOperator
from tests.faults import once

ROWS, BATCH = 101, 20  # five full batches, and one of a single row


def make_data() -> tuple[np.ndarray, np.ndarray]:
    features = np.random.default_rng(0).normal(size=(ROWS, 8)).astype("float32")
    return features, (features[:, 0] > 0).astype("int64") + (features[:, 1] > 0)


def make_model(*, normalized: bool = False) -> Any:
    keras.utils.set_random_seed(3)
    middle = [keras.layers.BatchNormalization()] if normalized else []
    layers = [keras.layers.Dense(16, activation="relu"), *middle, keras.layers.Dense(3)]
    return keras.Sequential(layers)


def model_creator(config: dict[str, Any]) -> Any:
    model = make_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(config.get("lr", 0.01)), loss=loss, metrics=["accuracy"])
    return model


def data_creator(config: dict[str, Any]) -> tuple[Any, Any]:
    data = tf.data.Dataset.from_tensor_slices(make_data())
    return data.batch(BATCH), data.batch(BATCH)


class Small(TrainingOperator):
    """The config has `normalized`, `fault` (rank, step, kind), and `marks`, a folder in which a fault is recorded."""

    def setup(self, config: dict[str, Any]) -> None:
        self.model, self.optimizer, self.criterion, _ = self.register(
            models=make_model(normalized=config.get("normalized", False)),
            optimizers=keras.optimizers.Adam(0.01),
            criterion=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=keras.metrics.SparseCategoricalAccuracy(name="hits"),
        )
        data = tf.data.Dataset.from_tensor_slices(make_data())
        self.register_data(train_dataset=data.shuffle(ROWS).batch(10), validation_dataset=data.batch(10))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        rank, step, kind = self.config.get("fault", (-1, -1, ""))
        if (rank, step) == (self.world_rank, self.global_step):
            fire(kind, self.config["marks"])
        if "pause" in self.config:
            time.sleep(self.config["pause"])
        return super().train_batch(batch, batch_info)


def fire(kind: str, marks: str) -> None:
    if not once(Path(marks, kind)):
        return
    if kind == "raise":
        raise ZeroDivisionError("planned")
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}[kind])


def arrays(state: dict[str, Any]) -> list[np.ndarray]:
    """Return the weights and the optimizer's slots."""
    return [np.asarray(array, "float64") for kind in ("models", "optimizers") for one in state[kind] for array in one]
