"""A replica's state as a dictionary of values and arrays, and as bytes without code. Both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from raysgd.errors import CheckpointError
from raysgd.replica.steps.position import check_counters
from raysgd.tf import archive
from raysgd.tf.registered import assign, values

FORMAT = "raysgd-tensorflow"
VERSION = 1


def gather(operator: Any, registered: Any) -> dict[str, Any]:
    """Gather models, optimizers with their slots, and the operator's own state, as copies."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "models": [values(model.weights) for model in registered.models],
        "optimizers": [values(optimizer.variables) for optimizer in registered.optimizers],
        "operator": operator.state_dict(),
        "global_step": operator.global_step,
    }


def check(registered: Any, state: dict[str, Any]) -> None:
    """Raise CheckpointError unless the state fits. Nothing is changed."""
    mine = {
        "models": [model.weights for model in registered.models],
        "optimizers": [optimizer.variables for optimizer in registered.optimizers],
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
    check_counters(state)


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


def restore(operator: Any, registered: Any, state: dict[str, Any]) -> None:
    """Load a checked state; the operator's own part last, as only it can check that."""
    for model, arrays in zip(registered.models, state["models"], strict=True):
        assign(model.weights, arrays)
    for optimizer, arrays in zip(registered.optimizers, state["optimizers"], strict=True):
        assign(optimizer.variables, arrays)
    operator.global_step = state.get("global_step", operator.global_step)
    operator.load_state_dict(state.get("operator"))


# -- bytes --------------------------------------------------------------------------------------------


dump = archive.dump


def unchanging(state: dict[str, Any]) -> dict[str, Any]:
    """Return a gathered state with a copy of what the user's `state_dict` returned: only that can
    change."""
    return {**state, **archive.load(archive.dump({"operator": state["operator"]}))}


@contextmanager
def packed(state: dict[str, Any]) -> Iterator[list[memoryview]]:
    yield [dump(state)]


def parse(data: Any) -> dict[str, Any]:
    """Read the state in these bytes. Raise CheckpointError if they are not one."""
    try:
        state = archive.load(data)
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
