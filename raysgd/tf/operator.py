"""The user's side of training with TensorFlow: a class that says what its parts are, and what a batch means."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from raysgd.constants import NUM_SAMPLES
from raysgd.core.meters import AverageMeterCollection
from raysgd.errors import ConfigError, shown
from raysgd.tf.operator_base import OperatorBase
from raysgd.tf.parts import as_list, is_keras_2, like

__all__ = ["TrainingOperator"]


class TrainingOperator(OperatorBase):
    """What a model, a batch, an epoch and a validation are.

        class Digits(TrainingOperator):
            def setup(self, config):
                model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
                self.model, self.optimizer, self.criterion = self.register(
                    models=model,
                    optimizers=keras.optimizers.Adam(config["lr"]),
                    criterion=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
                self.register_data(train_dataset=..., validation_dataset=...)

    The loop around it, in every worker:

        operator.setup(config)                          once, after the ranks have met
        for each trainer.train():
            operator.train_epoch(iterator, info)        until the epoch ends, or `num_steps` batches are done
                operator.train_batch(batch, batch_info) once for each batch; its numbers are averaged
        for each trainer.validate():
            operator.validate(iterator, info)
                operator.validate_batch(batch, batch_info)

    A data set's batch is that of all workers together; each gets its part of it. Override any of the methods. Owns
    the registered parts; never knows of processes, checkpoints or losses of workers.
    """

    model: Any
    optimizer: Any
    criterion: Any

    def train_epoch(
        self,
        iterator: Iterable[Any],
        info: dict[str, Any] | None = None,
        num_steps: int | None = None,
        epoch_idx: int = 0,
    ) -> dict[str, Any]:
        """One pass over `iterator`; returns what to report. Ends early when the group of workers changes."""
        common = dict(info or {}, epoch_idx=epoch_idx)
        self._meter = meter = AverageMeterCollection()
        for batch_idx, batch in enumerate(iterator):
            batch_info = {"batch_idx": batch_idx, "global_step": self.global_step, **common}
            self._count(iterator, self.train_batch(batch, batch_info), meter)
            self.global_step += 1
        return dict(meter.summary())

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """One step on one batch `(x, y)` or `(x, y, sample_weight)`, as one graph function."""
        x, y, weight = self._unpack(batch, "train_batch")
        with self.timers.record("step"):
            loss = self._train_graph(x, y, weight, self._counts)
        return {"train_loss": loss, NUM_SAMPLES: _rows(y)}

    def validate(self, val_iterator: Iterable[Any], info: dict[str, Any] | None = None) -> dict[str, Any]:
        """One pass without gradients; returns what to report."""
        self._meter = meter = AverageMeterCollection()
        for batch_idx, batch in enumerate(val_iterator):
            metrics = self.validate_batch(batch, {"batch_idx": batch_idx, **(info or {})})
            self._count(val_iterator, metrics, meter, "validate_batch")
        return dict(meter.summary())

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        """Loss and, for class numbers, arg-max accuracy of one batch `(x, y)`."""
        x, y, weight = self._unpack(batch, "validate_batch")
        with self.timers.record("eval"):
            loss, accuracy = self._validate_graph(x, y, weight)
        return {"val_loss": loss, "val_accuracy": accuracy, NUM_SAMPLES: _rows(y)}

    def _train_step(self, x: Any, y: Any, weight: Any, counts: bool) -> Any:
        with tf.GradientTape() as tape:
            output = self.model(x, training=True)
            loss = self._loss(y, output, weight)
            whole = tf.add_n([loss, *(tf.cast(extra, loss.dtype) for extra in self.model.losses)])
        self.step(tape, whole, model=self.model, optimizer=self.optimizer)
        if counts:
            self._update_metrics(y, output, weight)
        return loss

    def _validate_step(self, x: Any, y: Any, weight: Any) -> Any:
        output = self.model(x, training=False)
        self._update_metrics(y, output, weight)
        accuracy = 0.0
        if len(output.shape) > 1 and len(y.shape) == len(output.shape) - 1:
            guess = tf.argmax(output, axis=-1, output_type=tf.int64)
            accuracy = tf.reduce_mean(tf.cast(guess == tf.cast(y, tf.int64), tf.float32))
        return self._loss(y, output, weight), accuracy

    def _loss(self, y: Any, output: Any, weight: Any) -> Any:
        loss = self.criterion(y, output) if weight is None else self.criterion(y, output, sample_weight=weight)
        return tf.reduce_mean(loss)

    def _update_metrics(self, y: Any, output: Any, weight: Any) -> None:
        for metric in self._parts.metrics:
            metric.update_state(y, output, sample_weight=weight)

    def state_dict(self) -> Any:
        """Extra state of your own that belongs into checkpoints: plain values, arrays, and containers of them."""
        return None

    def load_state_dict(self, state_dict: Any) -> None:
        """Takes back what `state_dict` returned."""

    def resized(self, old_world_size: int, new_world_size: int) -> None:
        """Called on every rank after the number of workers changed. The batch of all workers stays what it was."""

    # -- registration ---------------------------------------------------------------------------------

    def register(self, *, models: Any, optimizers: Any, criterion: Any = None, metrics: Any = None) -> Any:
        """Takes the parts of training; gives them back, each in the container it came in. An absent criterion or
        absent metrics are left out of the answer. One optimizer for all models, or as many as there are models."""
        parts = self._parts
        parts.models, parts.optimizers = as_list(models), as_list(optimizers)
        if not parts.models or not all(hasattr(type(model), "trainable_variables") for model in parts.models):
            raise ConfigError(f"models must be a Keras model, or a list or tuple of them, got {models!r}")
        if len(parts.optimizers) not in (1, len(parts.models)) or not all(map(_is_optimizer, parts.optimizers)):
            raise ConfigError(
                f"optimizers must be one Keras optimizer, or one for each of the {len(parts.models)} models, "
                f"got {optimizers!r}"
            )
        parts.optimizers = [
            _scaling(optimizer, model) for optimizer, model in zip(parts.optimizers, parts.models, strict=False)
        ]
        if getattr(criterion, "reduction", None) == "sum":
            raise ConfigError(
                "the criterion sums over the batch, so its steps would depend on the number of workers: use "
                "reduction='sum_over_batch_size'"
            )
        parts.metrics, parts.criterion = as_list(metrics), criterion
        parts.registered = True
        answer = [like(models, parts.models), like(optimizers, parts.optimizers)]
        if criterion is not None:
            answer.append(criterion)
        if metrics is not None:
            answer.append(like(metrics, parts.metrics))
        return tuple(answer)

    def register_data(self, *, train_dataset: Any = None, validation_dataset: Any = None) -> None:
        """Takes the data: a `tf.data.Dataset` (or anything that can be iterated again and again) of batches."""
        for name, data in {"train_dataset": train_dataset, "validation_dataset": validation_dataset}.items():
            if data is not None and not hasattr(data, "__iter__") and not hasattr(data, "__getitem__"):
                raise ConfigError(f"{name} must be a tf.data.Dataset or another iterable of batches, got {data!r}")
        self._parts.train_dataset = train_dataset
        self._parts.validation_dataset = validation_dataset

    # -- for the default methods ----------------------------------------------------------------------

    _counts = True
    _train_graph: Any
    _validate_graph: Any
    _validation_prefix = "val_"

    def _complete(self) -> None:
        super()._complete()
        # As in the library's own fit: Keras 2 lets layers have tensors in their `if`s, Keras 3 does not.
        how = {"reduce_retracing": True, "autograph": any(map(is_keras_2, self._parts.models))}
        self._train_graph = tf.function(self._train_step, **how)
        self._validate_graph = tf.function(self._validate_step, **how)

    def _metrics(self) -> list[Any]:
        return self._parts.metrics

    def _on_report(self, prefix: str, report: dict[str, Any]) -> None:
        """A call has ended on this rank; `report` is what it will answer."""

    def _close(self) -> None:
        """The worker ends in good order."""

    def _count(self, iterator: Any, metrics: Any, meter: AverageMeterCollection, of: str = "train_batch") -> None:
        if not isinstance(metrics, dict):
            raise TypeError(f"{of} must return a dict of metrics, got {shown(metrics)}: {type(self).__name__}.{of}")
        samples = metrics.get(NUM_SAMPLES, 1)
        weight = samples if getattr(iterator, "fresh", True) else 0
        try:
            meter.update({name: value for name, value in metrics.items() if name != NUM_SAMPLES}, n=weight)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{type(self).__name__}.{of} returned what cannot be a metric: {error}") from None

    def _unpack(self, batch: Any, method: str) -> tuple[Any, Any, Any]:
        for name in ("model", "optimizer", "criterion"):
            if not hasattr(self, name):
                raise RuntimeError(
                    f"the default {method} needs self.{name}: set it in setup "
                    f"(self.model, self.optimizer, self.criterion = self.register(...)), or override {method}"
                )
        if isinstance(batch, (tuple, list)) and len(batch) in (2, 3):
            x, y, *weight = batch
            return x, y, weight[0] if weight else None
        raise TypeError(
            f"the default batch methods take (x, y) or (x, y, sample_weight), got a {type(batch).__name__}: override "
            "train_batch and validate_batch for other kinds of batches"
        )


def _rows(y: Any) -> int:
    return int(tf.nest.flatten(y)[0].shape[0])


def _is_optimizer(value: Any) -> bool:
    return hasattr(value, "apply_gradients")


def _scaling(optimizer: Any, model: Any) -> Any:
    """Under the policy mixed_float16 a loss must be scaled: Keras' own optimizer for that, around the user's."""
    policy = getattr(model, "dtype_policy", None) or getattr(model, "_dtype_policy", None)
    if getattr(policy, "name", "") != "mixed_float16" or "LossScale" in type(optimizer).__name__:
        return optimizer
    if is_keras_2(model):
        import tf_keras

        return tf_keras.mixed_precision.LossScaleOptimizer(optimizer)
    import keras

    return keras.optimizers.LossScaleOptimizer(optimizer)
