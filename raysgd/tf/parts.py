"""What an operator has registered, and the little in which Keras 3 and Keras 2 (tf_keras) differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from raysgd.errors import ConfigError

__all__ = [
    "Parts",
    "as_list",
    "as_tensor",
    "assign",
    "build_unbuilt",
    "is_keras_2",
    "like",
    "one_row",
    "optimizer_variables",
    "running_statistics",
    "values",
]


@dataclass
class Parts:
    """Owned by one operator."""

    models: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    metrics: list[Any] = field(default_factory=list)
    criterion: Any = None
    train_dataset: Any = None
    validation_dataset: Any = None
    registered: bool = False

    def trained_by(self, optimizer: Any) -> list[Any]:
        """The variables an optimizer is for: its own model's where there are as many of each, else all models'."""
        if len(self.models) == len(self.optimizers):
            at = next(place for place, mine in enumerate(self.optimizers) if mine is optimizer)
            return list(self.models[at].trainable_variables)
        return [variable for model in self.models for variable in model.trainable_variables]


def is_keras_2(model: Any) -> bool:
    return any(base.__module__.partition(".")[0] == "tf_keras" for base in type(model).__mro__)


def as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def like(given: Any, values: list[Any]) -> Any:
    """In the container that the user passed."""
    if isinstance(given, tuple):
        return tuple(values)
    return list(values) if isinstance(given, list) else values[0]


def as_tensor(variable: Any) -> Any:
    """A Keras 3 variable's value, or a TensorFlow variable's."""
    return tf.convert_to_tensor(variable)


def values(variables: Sequence[Any]) -> list[np.ndarray]:
    return [as_tensor(variable).numpy() for variable in variables]


def assign(variables: Sequence[Any], arrays: Sequence[Any]) -> None:
    for variable, array in zip(variables, arrays, strict=True):
        variable.assign(array)


def optimizer_variables(optimizer: Any) -> list[Any]:
    """Counters, slots and the learning rate, in an order that does not depend on what was trained when."""
    own = optimizer.variables
    found = list(own() if callable(own) else own)
    rate = getattr(optimizer, "_learning_rate", None)  # in Keras 2 it is not among the variables
    if isinstance(rate, tf.Variable) and all(rate is not each for each in found):
        found.append(rate)
    return found


def running_statistics(models: Sequence[Any]) -> list[Any]:
    """What training changes beside the trained variables: batch normalisation's moving averages, and the like."""
    found = []
    for model in models:
        for layer in _leaves(model):
            if layer.trainable:
                found += [v for v in layer.non_trainable_weights if tf.as_dtype(v.dtype).is_floating]
    return found


def _leaves(model: Any) -> Iterator[Any]:
    for layer in model._flatten_layers(include_self=True, recursive=True):
        if not any(True for _ in layer._flatten_layers(include_self=False, recursive=True)):
            yield layer


def build_unbuilt(parts: Parts) -> None:
    """Gives a model without variables its variables, from the shape of the data."""
    for model in parts.models:
        if not model.built or not model.variables:
            spec = getattr(parts.train_dataset, "element_spec", None)
            features = spec[0] if isinstance(spec, tuple) else spec
            if features is None or len(parts.models) > 1:
                raise ConfigError(
                    f"the model {model.name!r} has no variables yet, and its input shape is not known here: begin it "
                    "with an Input layer, or call model.build(input_shape) in setup"
                )
            model(tf.nest.map_structure(one_row, features), training=False)


def one_row(spec: Any) -> Any:
    """A batch of one row, for shapes' sake."""
    shape = [1, *(size or 1 for size in spec.shape[1:])]
    return tf.zeros(shape, spec.dtype) if spec.dtype != tf.string else tf.fill(shape, "")
