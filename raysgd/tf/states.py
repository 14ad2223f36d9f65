"""A replica's state as a dictionary of plain values and arrays, and as bytes that run no code when read. Both."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from raysgd.errors import CheckpointError
from raysgd.storage import values
from raysgd.tf.parts import assign, optimizer_variables
from raysgd.tf.parts import values as values_of
from raysgd.training.position import check_count

__all__ = [
    "FORMAT",
    "check",
    "check_random",
    "dump",
    "gather",
    "parse",
    "random_state",
    "restore",
    "restore_random",
    "restore_variables",
]

FORMAT = "raysgd-tensorflow"
VERSION = 1


def gather(operator: Any) -> dict[str, Any]:
    """Return models, optimizers with their slots, and the operator's own state, as copies."""
    parts = operator._parts
    return {
        "format": FORMAT,
        "version": VERSION,
        "models": [values_of(model.weights) for model in parts.models],
        "optimizers": [values_of(optimizer_variables(optimizer)) for optimizer in parts.optimizers],
        "operator": operator.state_dict(),
        "global_step": operator.global_step,
    }


def check(operator: Any, state: dict[str, Any]) -> None:
    """Raise CheckpointError unless the state fits. Nothing is changed."""
    parts = operator._parts
    mine = {
        "models": [model.weights for model in parts.models],
        "optimizers": [optimizer_variables(optimizer) for optimizer in parts.optimizers],
    }
    for kind, groups in mine.items():
        saved = state.get(kind)
        if not isinstance(saved, list) or not all(isinstance(arrays, list) for arrays in saved):
            raise CheckpointError(f"the checkpoint's {kind} are not lists of arrays")
        if len(groups) != len(saved):
            raise CheckpointError(f"the checkpoint has {len(saved)} {kind}, and this operator registers {len(groups)}")
        for number, (variables, arrays) in enumerate(zip(groups, saved, strict=True)):
            here, there = [_of_variable(each) for each in variables], [_of_array(each) for each in arrays]
            if here != there:
                raise CheckpointError(_difference(f"{kind[:-1]} {number}", here, there))
    for number, (optimizer, arrays) in enumerate(zip(parts.optimizers, state["optimizers"], strict=True)):
        for variable, array in zip(optimizer_variables(optimizer), arrays, strict=True):
            if variable is optimizer.iterations and int(array) < 0:
                raise CheckpointError(f"optimizer {number} has made {int(array)} steps in the checkpoint")
    check_count("global_step", state.get("global_step", 0))


def _of_variable(variable: Any) -> tuple[str, tuple[int, ...]]:
    import tensorflow as tf

    return np.dtype(tf.as_dtype(variable.dtype).as_numpy_dtype).name, tuple(variable.shape)


def _of_array(array: Any) -> tuple[str, tuple[int, ...]]:
    if not isinstance(array, (np.ndarray, np.generic)):
        return type(array).__name__, ()
    return array.dtype.name, array.shape


def _difference(name: str, here: list[Any], there: list[Any]) -> str:
    pairs = zip(here, there, strict=False)
    place = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(here), len(there)))
    mine, theirs = (" of shape ".join(map(str, each[place])) if place < len(each) else "none" for each in (here, there))
    return (
        f"{name} has {len(here)} variables here and {len(there)} in the checkpoint; they differ from variable {place} "
        f"on: {mine} here, {theirs} there"
    )


def restore(operator: Any, state: dict[str, Any]) -> None:
    """Load a checked state. The operator's own part is last, because only the operator can check it."""
    restore_variables(operator, state)
    operator.load_state_dict(state.get("operator"))


def restore_variables(operator: Any, state: dict[str, Any]) -> None:
    """Load all but the operator's own part."""
    parts = operator._parts
    for model, arrays in zip(parts.models, state["models"], strict=True):
        assign(model.weights, arrays)
    for optimizer, arrays in zip(parts.optimizers, state["optimizers"], strict=True):
        assign(optimizer_variables(optimizer), arrays)
    operator.global_step = state.get("global_step", operator.global_step)


# -- bytes --------------------------------------------------------------------------------------------


def dump(state: dict[str, Any]) -> memoryview:
    """Return a state as bytes."""
    return values.dump(state)


def parse(data: Any) -> dict[str, Any]:
    """Return the state in these bytes. Raise CheckpointError if they are damaged, or not a checkpoint."""
    try:
        state = values.load(data)
    except CheckpointError as error:
        raise CheckpointError(f"not a complete checkpoint of a TFTrainer: {error}") from error
    return shaped(state)


def shaped(state: Any) -> dict[str, Any]:
    if not isinstance(state, dict) or state.get("format") != FORMAT or not isinstance(state.get("models"), list):
        raise CheckpointError(f"this is not a checkpoint of a TFTrainer (its format would be {FORMAT!r})")
    version = state.get("version")
    if type(version) is not int or version < 1:
        raise CheckpointError(f"this is not a checkpoint of a TFTrainer: its format version is {version!r:.60}")
    if version > VERSION:
        raise CheckpointError(f"this checkpoint was written by a newer raysgd (format version {version})")
    return state


# -- random states ------------------------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """Return this process's random states, of Python and NumPy (TensorFlow's cannot be read)."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {"python": [version, list(internal), gauss], "numpy": [kind, keys, position, has_gauss, cached]}


def restore_random(state: dict[str, Any]) -> None:
    python, numpy = _generators(state)
    random.setstate(python)
    np.random.set_state(numpy)


def check_random(ranks: Any) -> None:
    """Raise CheckpointError unless random states can be set, which is tried on generators made for it."""
    if ranks is not None and not isinstance(ranks, list):
        raise CheckpointError(f"the checkpoint's random states are a {type(ranks).__name__}, not one for each rank")
    for rank, state in enumerate(ranks or []):
        try:
            python, numpy = _generators(state)
            trial = random.Random()
            trial.setstate(python)
            if trial.getstate() != python:  # setstate() drops the upper bits of numbers that are too large
                raise ValueError("Python's state differs after it was set")
            np.random.RandomState().set_state(numpy)
            # NumPy does not check the position, and would read beyond the numbers.
            if len(numpy[1]) != 624 or type(numpy[2]) is not int or not 0 <= numpy[2] <= 624:
                raise ValueError(f"a position of {numpy[2]!r:.60} in {len(numpy[1])} numbers")
        except Exception as error:
            said = str(error) or type(error).__name__
            raise CheckpointError(f"the random state of rank {rank} in the checkpoint is not one ({said})") from error


def _generators(state: dict[str, Any]) -> tuple[Any, Any]:
    version, internal, gauss = state["python"]
    kind, keys, position, has_gauss, cached = state["numpy"]
    return (version, tuple(internal), gauss), (kind, np.asarray(keys, np.uint32), position, has_gauss, cached)
