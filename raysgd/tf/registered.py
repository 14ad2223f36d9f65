"""What an operator has registered, and its variables. Worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from raysgd.errors import ConfigError
from raysgd.replica.operator_base import RegisteredBase
from raysgd.tf import foreign


@dataclass
class KerasRegistered(RegisteredBase):
    """Adds what only TensorFlow needs."""

    metrics: list[Any] = field(default_factory=list)
    train_dataset: Any = None
    validation_dataset: Any = None
    test_dataset: Any = None

    def trained_by(self, optimizer: Any) -> list[Any]:
        """An optimizer's variables: those of its own model, or of all models."""
        if len(self.models) == len(self.optimizers):
            at = next(place for place, mine in enumerate(self.optimizers) if mine is optimizer)
            return list(self.models[at].trainable_variables)
        return [variable for model in self.models for variable in model.trainable_variables]

    def steps_made(self) -> int:
        return sum(map(foreign.times_applied, self.optimizers))


def graph_function(function: Callable[..., Any]) -> Any:
    """Make a graph function, as Keras' own `fit` does."""
    return tf.function(function, reduce_retracing=True, autograph=False)


def refuse_sum(loss: Any, name: str) -> None:
    """Raise ConfigError for a loss that is a sum over the batch."""
    if getattr(loss, "reduction", None) == "sum":
        raise ConfigError(
            f"{name} sums over the batch, so its steps would depend on the number of workers: use "
            "reduction='sum_over_batch_size'"
        )


def refuse_own_steps(models: Sequence[Any], operator_cls: type) -> None:
    """Raise ConfigError for a model's own step if the operator has raysgd's loop and its method for
    a batch: they would train or validate in another way."""
    for step, method, loop in (
        ("train_step", "train_batch", "train_epoch"),
        ("test_step", "validate_batch", "validate"),
    ):
        if not all(getattr(operator_cls, each).__module__.startswith("raysgd.") for each in (method, loop)):
            continue
        for model in models:
            function = getattr(model, step, None)
            if function is not None and getattr(function, "__func__", function) is not getattr(keras.Model, step):
                raise ConfigError(
                    f"{type(model).__name__} has a {step} of its own, which raysgd does not call: write {method} in a "
                    "TrainingOperator, with what the step does"
                )


def refuse_arrays(data: Any, name: str) -> None:
    """Raise ConfigError for data as Keras' `fit` takes it, `(x, y)`: iterating over it would give
    its arrays as batches. (Batches in a tuple are tuples.)"""
    first: Any = data[0] if isinstance(data, tuple) and data else ()
    if not isinstance(first, tuple) and any(hasattr(leaf, "shape") for leaf in tf.nest.flatten(first)):
        raise ConfigError(
            f"{name} must be a tf.data.Dataset of batches, got arrays: pass tf.data.Dataset.from_tensor_slices((x, y)).batch(n)"
        )


def as_tensor(variable: Any) -> Any:
    """The value of a Keras 3 variable, or of a TensorFlow variable."""
    return tf.convert_to_tensor(variable)


def values(variables: Sequence[Any]) -> list[np.ndarray]:
    return [as_tensor(variable).numpy() for variable in variables]


def assign(variables: Sequence[Any], arrays: Sequence[Any]) -> None:
    for variable, array in zip(variables, arrays, strict=True):
        variable.assign(array)


@contextmanager
def keep_values(variables: Sequence[Any]) -> Iterator[None]:
    """Let variables have the same values after a block as before it."""
    before = [tf.identity(as_tensor(variable)) for variable in variables]
    try:
        yield
    finally:
        assign(variables, before)


def running_statistics(models: Sequence[Any]) -> list[Any]:
    """Collect what training changes besides, such as averages of batch normalisation."""
    variables = []
    for model in models:
        for layer in foreign.layers_without_inner_ones(model):
            if layer.trainable:
                variables += [v for v in layer.non_trainable_weights if tf.as_dtype(v.dtype).is_floating]
    return variables


def seed_states(models: Sequence[Any]) -> list[Any]:
    """Collect the states of the layers' random generators, which are not weights."""
    states = []
    for model in models:
        weights = {id(weight) for weight in model.weights}
        states += [
            v for v in model.variables if id(v) not in weights and tuple(v.shape) == (2,) and "int" in str(v.dtype)
        ]
    return states


def build_unbuilt(registered: KerasRegistered) -> None:
    """Create the variables of models that have none yet, from the shape of the data."""
    for model in registered.models:
        # A model may only consist of models that are built, which train_batch uses, and have no `call`.
        if (not model.built and type(model).call is not keras.Model.call) or not model.variables:
            spec = getattr(registered.train_dataset, "element_spec", None)
            features = spec[0] if isinstance(spec, tuple) else spec
            if features is None or len(registered.models) > 1:
                raise ConfigError(
                    f"the model {model.name!r} has no variables yet, and its input shape is not known here: begin it "
                    "with an Input layer, or call model.build(input_shape) in setup"
                )
            model(tf.nest.map_structure(one_row, features), training=False)


def rows_in(batch: Any) -> int:
    return int(tf.nest.flatten(batch)[0].shape[0])


def one_row(spec: Any) -> Any:
    """Make a batch of one row with the shapes of `spec`."""
    shape = [1, *(size or 1 for size in spec.shape[1:])]
    return tf.zeros(shape, spec.dtype) if spec.dtype != tf.string else tf.fill(shape, "")
