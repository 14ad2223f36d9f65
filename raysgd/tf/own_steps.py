"""Keras models with a `train_step` or `test_step`: average what their optimizers apply. Worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from raysgd.errors import ConfigError
from raysgd.tf.channel import Channel
from raysgd.tf.parts import graph_function, keep_values
from raysgd.tf.results import metric_results


class OwnStep:
    """Runs a model's own `train_step` or `test_step`, as Keras' `fit` and `evaluate` do. Owns what
    it has returned last, because that is what Keras reports for an epoch."""

    def __init__(self, model: Any, step: Callable[[Any], Any]) -> None:
        self._model, self._step = model, step
        self.names: list[str] = []
        self._logs: dict[str, float] = {}
        self._weight = 0.0  # the rows of the last batch
        self._own: set[str] = set()
        self._unreported: set[str] = set()
        self.make()

    def make(self) -> None:
        """Create the graph function, unless the model is compiled with `run_eagerly=True`."""
        self._run: Any = self._step if self._model.run_eagerly else graph_function(self._step)

    def trace(self, spec: Any) -> None:
        """Trace the graph function for any batch size, which creates all variables."""
        if spec is not None and not self._model.run_eagerly:
            traced = self._run.get_concrete_function(tf.nest.map_structure(_of_any_size, spec))
            self.names = sorted(_numbers(traced.structured_outputs, self._step))

    def __call__(self, batch: Any, rows: int, *, counts: bool) -> dict[str, Any]:
        """Run the step, and return its numbers. Without `counts`, metrics do not change."""
        with keep_values([] if counts else self._model.metrics_variables):
            logs = {name: float(value) for name, value in _numbers(self._run(batch), self._step).items()}
        self.names, self._weight = sorted(logs), float(rows if counts else 0)
        if counts:
            self._logs = logs
        return logs

    def settle(self) -> None:
        """Note which of the returned numbers are not results of the model's metrics."""
        results = metric_results(self._model.metrics, Channel())
        alike = results.keys() == self._logs.keys()  # then Keras' `fit` reports the metrics
        self._unreported = results.keys() - set(self.names)
        self._own = {
            name
            for name, value in self._logs.items()
            if name not in results or not (results[name] == value or (alike and results[name]))
        }

    def report(self, report: dict[str, Any], prefix: str, channel: Channel) -> None:
        """Make a report of all metrics one of what the step returns: results of metrics, and for
        its own numbers their mean over the ranks' last batches. All ranks must call this at the
        same time."""
        for name in self._unreported:
            report.pop(prefix + name, None)
        weight, number = self._weight, len(self.names)
        values = [weight * self._logs[name] if weight else 0.0 for name in self.names]
        sums = channel.sum(
            [tf.constant([weight, *values, *(float(name in self._own) for name in self.names)], tf.float64)]
        )
        rows, *totals = sums[0].numpy().tolist()
        for name, total, own in zip(self.names, totals[:number], totals[number:], strict=True):
            if own and rows:
                report[prefix + name] = total / rows


def own_step(model: Any, name: str) -> OwnStep | None:
    """Find the step of this name if the model's class defines it itself."""
    if getattr(type(model), name) is getattr(keras.Model, name):
        return None
    return OwnStep(model, getattr(model, name))


def further_optimizers(model: Any) -> list[Any]:
    """Find a model's optimizers besides the compiled one, such as those of a GAN's parts."""
    values = [value for name, value in sorted(vars(model).items()) if name not in ("optimizer", "_optimizer")]
    listed = [each for value in values for each in (value if isinstance(value, (list, tuple)) else [value])]
    found = [each for each in listed if hasattr(each, "apply_gradients") and each is not model.optimizer]
    return list({id(each): each for each in found}.values())


def refuse_unbuilt(model: Any, optimizers: Sequence[Any]) -> None:
    """Raise ConfigError for optimizers that would get their variables from the first batch."""
    if unbuilt := [type(each).__name__ for each in optimizers if not getattr(each, "built", True)]:
        raise ConfigError(
            f"{type(model).__name__} has optimizers without variables: {', '.join(unbuilt)}. A new worker could not load their state, "
            "because they are created by its first batch. Call optimizer.build(variables) in model_creator"
        )


def average_applied(optimizer: Any, average: Callable[[Sequence[Any]], list[Any]]) -> None:
    """Let an optimizer apply `average(gradients)` instead of the gradients that it gets."""
    apply = optimizer.apply  # which apply_gradients calls

    def averaged(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        means = average(list(grads))
        if not optimizer.built:  # variables could not be created below
            optimizer.build(trainable_variables)
        # The optimizer counts its steps without reading the gradients: it must not do so before they have arrived.
        with tf.control_dependencies([mean for mean in means if mean is not None]):
            return apply(means, trainable_variables)

    # Nothing needs converting, and trying takes seconds.
    optimizer.apply = tf.autograph.experimental.do_not_convert(averaged)


def _of_any_size(spec: Any) -> Any:
    return tf.TensorSpec([None, *spec.shape[1:]], spec.dtype) if isinstance(spec, tf.TensorSpec) else spec


def _numbers(logs: Any, step: Callable[..., Any]) -> dict[str, Any]:
    if not isinstance(logs, dict):
        raise TypeError(f"{step.__qualname__} must return a dict of numbers, got {type(logs).__name__}")
    return {name: value for name, value in logs.items() if getattr(value, "shape", ()) == ()}
