"""RaySGD's API: raysgd's loop trains a compiled Keras model with its compiled loss, optimizer and
metrics. Worker.

`model.fit` does not work on several workers, and could not be interrupted in the middle of an
epoch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf

from raysgd.config import at_least
from raysgd.constants import NUM_SAMPLES
from raysgd.errors import ConfigError, shown
from raysgd.tf.operator import TrainingOperator
from raysgd.tf.registered import keep_values, one_row, refuse_sum, rows_in

EVALUATE, FIT = "evaluate_config", "fit_config"

TAKEN = {
    FIT: ("epochs", "steps_per_epoch", "callbacks", "verbose"),
    EVALUATE: ("steps", "callbacks", "verbose"),
}
UNUSED = {"max_queue_size", "shuffle", "use_multiprocessing", "workers"}  # by Keras, for a tf.data.Dataset
INSTEAD = {
    "x": "the data is what data_creator returns",
    "y": "the data is what data_creator returns",
    "sample_weight": "let the data set give (x, y, sample_weight)",
    "class_weight": "let the data set give (x, y, sample_weight), or write train_batch in an operator",
    "batch_size": "call .batch(n) on the data set",
    "validation_split": "data_creator returns the validation data second",
    "validation_data": "data_creator returns it second, and validate() runs over it",
    "validation_freq": "call validate() after the epochs of your choice",
    "initial_epoch": "load() a checkpoint: it holds the epoch",
    "validation_steps": "pass num_steps to validate()",
}
WITHOUT_END = (
    "no fit of Keras ends here, because without 'epochs' in config['fit_config'] each train() is one epoch of a longer fit. So the "
    "weights never become those of %s. Pass 'epochs': one train() then trains so many, and ends as fit does"
)


class CompiledOperator(TrainingOperator):
    """Owns the compiled model and the Keras callbacks; `operator_from_creators` subclasses it."""

    model_creator: Callable[[dict[str, Any]], Any]
    data_creator: Callable[[dict[str, Any]], Any]
    _validation_prefix = "validation_"
    _fits: bool  # whether the callbacks are between on_train_begin and on_train_end
    _fit_logs: dict[str, Any]  # of the last epoch

    def setup(self, config: dict[str, Any]) -> None:
        self._fit = checked_fit_config(config, FIT)
        train, test = _pair(type(self).data_creator(config))
        self.model = model = type(self).model_creator(config)
        if getattr(model, "optimizer", None) is None or not getattr(model, "compiled", True):
            raise ConfigError("model_creator must return a compiled model: call model.compile(optimizer=..., loss=...)")
        self.register(models=model, optimizers=model.optimizer)
        self.optimizer = self._registered.optimizers[0]
        if (steps := model.steps_per_execution) > 1:
            raise ConfigError(
                f"the model was compiled with steps_per_execution={steps}, which has no effect here: raysgd runs one batch at a "
                "time, so that it can continue after each of them when a worker fails. Leave it out"
            )
        if self._settings.distributed:
            for loss in tf.nest.flatten(model.loss):
                refuse_sum(loss, "a compiled loss")
        self.register_data(train_dataset=train, validation_dataset=test)
        self._fit_callbacks = self._callbacks(self._fit)
        self._evaluate_callbacks = self._callbacks(checked_fit_config(config, EVALUATE))
        self._fits, self._fit_logs = False, {}
        self._warn_of_no_end()

    def _build(self) -> None:
        """Create the metrics, too: Keras waits for the first batch, which a rank may not have."""
        super()._build()
        spec = getattr(self._registered.train_dataset, "element_spec", None)
        if spec is None:
            return
        x, y, weight = _unpacked(tf.nest.map_structure(one_row, spec))
        output = self.model(x, training=False)
        self._loss_of_model(x, y, output, weight, training=False)
        self.model.compute_metrics(x, y, output, sample_weight=weight)
        for metric in self._metrics():
            metric.reset_state()

    def _callbacks(self, config: Mapping[str, Any]) -> Any:
        callbacks = config.get("callbacks") or []
        return keras.callbacks.CallbackList(list(callbacks), model=self.model, add_history=False)

    def _warn_of_no_end(self) -> None:
        """Warn if something has its effect at the end of a fit, and no fit ends."""
        if "epochs" in self._fit:
            return
        optimizer = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        restores = [each for each in self._fit_callbacks.callbacks if getattr(each, "restore_best_weights", False)]
        without = [f"{type(each).__name__}(restore_best_weights=True)" for each in restores]
        if getattr(optimizer, "use_ema", False) and not optimizer.ema_overwrite_frequency:
            without.append(f"{type(optimizer).__name__}(use_ema=True)")
        if without:
            self._internals.warn_once(WITHOUT_END, " or ".join(without))

    # -- batches --------------------------------------------------------------------------------------

    def train_epoch(
        self,
        iterator: Iterable[Any],
        info: dict[str, Any] | None = None,
        num_steps: int | None = None,
        epoch_idx: int = 0,
    ) -> dict[str, Any]:
        self._epoch_idx = epoch_idx
        if not self._fits:
            self._fits = True
            self._fit_callbacks.on_train_begin()
        self._fit_callbacks.on_epoch_begin(epoch_idx)
        return super().train_epoch(iterator, info, num_steps, epoch_idx)

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        x, y, weight = _unpacked(batch)
        place = batch_info["batch_idx"]
        self._fit_callbacks.on_train_batch_begin(place)
        variables = [] if self._counts else self.model.metrics_variables  # Keras has one for each output's loss
        with self.timers.record("step"), keep_values(variables):
            loss = self._train_graph(x, y, weight, self._counts)
        self._fit_callbacks.on_train_batch_end(place, {"loss": float(loss)})
        return {"train_loss": loss, NUM_SAMPLES: rows_in(x)}

    def validate(self, val_iterator: Iterable[Any], info: dict[str, Any] | None = None) -> dict[str, Any]:
        self._evaluate_callbacks.on_test_begin()
        return super().validate(val_iterator, info)

    def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        x, y, weight = _unpacked(batch)
        place = batch_info["batch_idx"]
        self._evaluate_callbacks.on_test_batch_begin(place)
        with self.timers.record("eval"):
            loss = self._validate_graph(x, y, weight)
        self._evaluate_callbacks.on_test_batch_end(place, {"loss": float(loss)})
        return {"validation_loss": loss, NUM_SAMPLES: rows_in(x)}

    def _train_step(self, x: Any, y: Any, weight: Any, counts: bool) -> Any:
        with tf.GradientTape() as tape:
            output = self.model(x, training=True)
            self._warn_of_divisor(tf.nest.flatten(self.model.loss), output, weight)
            loss = self._loss_of_model(x, y, output, weight, training=True)
        self.step(tape, loss, model=self.model, optimizer=self.optimizer)
        if counts:
            self.model.compute_metrics(x, y, output, sample_weight=weight)
        return loss

    def _predict_step(self, x: Any) -> Any:
        return self.model.predict_step((x,))

    def _validate_step(self, x: Any, y: Any, weight: Any) -> Any:
        output = self.model(x, training=False)
        self.model.compute_metrics(x, y, output, sample_weight=weight)
        return self._loss_of_model(x, y, output, weight, training=False)

    def _loss_of_model(self, x: Any, y: Any, output: Any, weight: Any, *, training: bool) -> Any:
        """Compute the loss as Keras does. The method of a model of an earlier version may not take
        `training`."""
        compute = self.model.compute_loss
        more = {"training": training} if "training" in inspect.signature(compute).parameters else {}
        return compute(x=x, y=y, y_pred=output, sample_weight=weight, **more)

    # -- hooks of the replica -------------------------------------------------------------------------

    def _metrics(self) -> list[Any]:
        return list(self.model.metrics)

    def _on_report(self, prefix: str, report: dict[str, Any]) -> bool:
        """Call the Keras callbacks with what all workers measured, so that all decide alike."""
        train = prefix == "train_"
        callbacks = self._fit_callbacks if train else self._evaluate_callbacks
        if callbacks.callbacks:
            samples = float(report.get(NUM_SAMPLES, 0))
            loss = samples and report.get(prefix + "loss", 0.0) * samples
            total, count = self._internals.channel.sum(
                [tf.constant(loss, tf.float64), tf.constant(samples, tf.float64)]
            )
            logs = {name.removeprefix(prefix): value for name, value in report.items() if name.startswith(prefix)}
            logs["loss"] = float(total) / max(float(count), 1.0)
            if train:
                self._fit_logs = logs
                callbacks.on_epoch_end(self._epoch_idx, logs)
            else:
                callbacks.on_test_end(logs)
        stop = train and getattr(self.model, "stop_training", False)
        if stop:
            self.model.stop_training = False  # it is for this call only
        return bool(stop)

    def _end_fit(self) -> None:
        self.optimizer.finalize_variable_values(self.model.trainable_weights)
        self._close()

    def _close(self) -> None:
        if self._fits:
            self._fits = False
            self._fit_callbacks.on_train_end(self._fit_logs)


def operator_from_creators(
    model_creator: Callable[[dict[str, Any]], Any], data_creator: Callable[[dict[str, Any]], Any]
) -> type[CompiledOperator]:
    """Make an operator class from RaySGD's two creators."""
    for name, creator in {"model_creator": model_creator, "data_creator": data_creator}.items():
        if not callable(creator):
            raise ConfigError(f"{name} must be a function that takes config, got {creator!r}")
    parts = {"model_creator": staticmethod(model_creator), "data_creator": staticmethod(data_creator)}
    return type("CompiledModel", (CompiledOperator,), parts)


def checked_fit_config(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Read `config[name]`. Raise ConfigError for arguments that have no effect here."""
    arguments = config.get(name) or {}
    if not isinstance(arguments, Mapping):
        raise ConfigError(f"config[{name!r}] must be a dict of keyword arguments, got {arguments!r}")
    arguments = {key: value for key, value in arguments.items() if key not in UNUSED}
    for key in arguments:
        if key not in TAKEN[name]:
            hint = INSTEAD.get(key, f"only {', '.join(TAKEN[name])} have an effect")
            raise ConfigError(f"config[{name!r}] cannot have {key!r}: {hint}")
    for key in ("epochs", "steps_per_epoch", "steps"):
        if arguments.get(key) is not None:
            at_least(f"config[{name!r}][{key!r}]", arguments[key], 1, whole=True)
    return dict(arguments)


def _pair(data: Any) -> tuple[Any, Any]:
    if not isinstance(data, (tuple, list)) or len(data) != 2 or any(hasattr(each, "shape") for each in data):
        raise ConfigError(f"data_creator must return (train_dataset, validation_dataset), got {shown(data)}")
    return data[0], data[1]


def _unpacked(batch: Any) -> tuple[Any, Any, Any]:
    """A batch as Keras reads it: x, (x, y) or (x, y, sample_weight)."""
    if not isinstance(batch, (tuple, list)):
        return batch, None, None
    x, y, weight = [*batch, None, None][:3]
    return x, y, weight
