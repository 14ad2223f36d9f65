"""Keras models that define train_step or test_step themselves. The config's `model` names one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tests.tf.small import ROWS, make_data, make_model

__all__ = ["data_creator", "model_creator"]


def data_creator(config: dict[str, Any]) -> tuple[Any, Any]:
    features, labels = make_data()
    kinds = {"gan": features, "eager gan": features, "ordinary": (features, labels)}
    data = tf.data.Dataset.from_tensor_slices(kinds.get(config["model"], (features, labels)))
    return data.batch(20), data.batch(ROWS)


def model_creator(config: dict[str, Any]) -> Any:
    keras.utils.set_random_seed(3)
    return MODELS[config["model"]]()


def _compiled(model_cls: type, *, normalized: bool = True, **more: Any) -> Any:
    inner = make_model(normalized=normalized)
    x = keras.Input((8,))
    model = model_cls(x, inner(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(**{"optimizer": keras.optimizers.Adam(0.01), "loss": loss, "metrics": ["accuracy"], **more})
    return model


class Penalized(keras.Model):  # type: ignore[misc]
    """Adds a penalty to the compiled loss, updates the compiled metrics, and returns a number of its own."""

    def train_step(self, data: Any) -> Any:
        x, y, weight = [*data, None][:3]
        with tf.GradientTape() as tape:
            output = self(x, training=True)
            penalty = 0.01 * tf.add_n([tf.reduce_sum(w**2) for w in self.trainable_variables])
            loss = self.compute_loss(x=x, y=y, y_pred=output, sample_weight=weight) + penalty
        found = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(found, self.trainable_variables, strict=True))
        metrics = self.compute_metrics(x, y, output, sample_weight=weight)
        return {**metrics, "penalty": penalty, "loss": loss}


class Eager(keras.Model):  # type: ignore[misc]
    """Reads tensors in Python, which a graph cannot."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        found = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(found, self.trainable_variables, strict=True))
        return {"loss": loss, "largest": max(float(tf.reduce_max(abs(each))) for each in found)}


class Tracked(keras.Model):  # type: ignore[misc]
    """Tracks the losses of both steps in a metric of its own, and the absolute error in the test step only."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.seen, self.error = keras.metrics.Mean(name="seen"), keras.metrics.MeanAbsoluteError(name="error")

    @property
    def metrics(self) -> list[Any]:
        return [self.seen, self.error]

    def _loss(self, x: Any, y: Any, *, training: bool) -> tuple[Any, Any]:
        output = self(x, training=training)[:, 0]
        return tf.reduce_mean((output - tf.cast(y, output.dtype)) ** 2), output

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss, _ = self._loss(x, y, training=True)
        found = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(found, self.trainable_variables, strict=True))
        self.seen.update_state(loss, sample_weight=tf.shape(x)[0])
        return {"seen": self.seen.result()}

    def test_step(self, data: Any) -> Any:
        x, y = data
        loss, output = self._loss(x, y, training=False)
        self.seen.update_state(loss, sample_weight=tf.shape(x)[0])
        self.error.update_state(y[:, None], output[:, None])  # rows of one number each
        return {"seen": self.seen.result(), "error": self.error.result()}


class Gan(keras.Model):  # type: ignore[misc]
    """Two models with an optimizer each, and no call of its own. The data is x alone."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
        self.judge = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        self.to_make, self.to_judge = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.05)

    def train_step(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            judged = tf.nn.softplus(-self.judge(x)) + tf.nn.softplus(self.judge(self.maker(x[:, ::-1])))
            judge_loss = tf.reduce_mean(judged)
        found = tape.gradient(judge_loss, self.judge.trainable_variables)
        self.to_judge.apply_gradients(zip(found, self.judge.trainable_variables, strict=True))
        with tf.GradientTape() as tape:
            make_loss = tf.reduce_mean(tf.nn.softplus(-self.judge(self.maker(x[:, ::-1]))))
        found = tape.gradient(make_loss, self.maker.trainable_variables)
        self.to_make.apply_gradients(zip(found, self.maker.trainable_variables, strict=True))
        return {"judge_loss": judge_loss, "make_loss": make_loss}


class Hidden(keras.Model):  # type: ignore[misc]
    """Applies gradients without an optimizer, so that they are not averaged."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        found = tape.gradient(loss, self.trainable_variables)
        for gradient, variable in zip(found, self.trainable_variables, strict=True):
            variable.assign_sub(0.1 * gradient)
        return {"loss": loss}


def _gan(**given: Any) -> Any:
    model = Gan()
    model.compile(**given)
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "penalized": lambda: _compiled(Penalized),
    "eager": lambda: _compiled(Eager, run_eagerly=True, metrics=None),
    "tracked": lambda: _compiled(Tracked, normalized=False),  # a worker would normalize by its own rows
    "gan": _gan,
    "eager gan": lambda: _gan(run_eagerly=True),
    "hidden": lambda: _compiled(Hidden),
}
