"""A replica's state as one dictionary of plain values and arrays, and as bytes that run no code when they are read.

The bytes are a zip archive (as NumPy's npz): `state.json` with everything but the arrays, and one `.npy` for each of
those. A truncated or damaged archive says so.
"""

from __future__ import annotations

import io
import json
import random
import zipfile
from typing import Any

import numpy as np

from raysgd.errors import CheckpointError
from raysgd.tf.parts import assign, optimizer_variables, values

__all__ = ["FORMAT", "check", "dump", "gather", "parse", "random_state", "restore", "restore_random"]

FORMAT = "raysgd-tensorflow"
VERSION = 1
HEAD = "state.json"


def gather(operator: Any) -> dict[str, Any]:
    """Models, optimizers with their slots, and the operator's own state, as copies."""
    parts = operator._parts
    return {
        "format": FORMAT,
        "version": VERSION,
        "models": [values(model.weights) for model in parts.models],
        "optimizers": [values(optimizer_variables(optimizer)) for optimizer in parts.optimizers],
        "operator": operator.state_dict(),
        "global_step": operator.global_step,
    }


def check(operator: Any, state: dict[str, Any]) -> None:
    """Would it fit? Raises, with what does not, before anything is changed."""
    parts = operator._parts
    mine = {
        "models": [model.weights for model in parts.models],
        "optimizers": [optimizer_variables(optimizer) for optimizer in parts.optimizers],
    }
    for kind, groups in mine.items():
        saved = state.get(kind) or []
        if len(groups) != len(saved):
            raise CheckpointError(f"the checkpoint has {len(saved)} {kind}, and this operator registers {len(groups)}")
        for number, (variables, arrays) in enumerate(zip(groups, saved, strict=True)):
            here, there = [tuple(v.shape) for v in variables], [tuple(np.shape(array)) for array in arrays]
            if here != there:
                raise CheckpointError(_difference(f"{kind[:-1]} {number}", here, there))


def _difference(name: str, here: list[Any], there: list[Any]) -> str:
    pairs = zip(here, there, strict=False)
    place = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(here), len(there)))
    mine, theirs = here[place : place + 1] or "none", there[place : place + 1] or "none"
    return (
        f"{name} has {len(here)} variables here and {len(there)} in the checkpoint; they differ from variable {place} "
        f"on: {mine} here, {theirs} there"
    )


def restore(operator: Any, state: dict[str, Any]) -> None:
    """Takes a checked state."""
    parts = operator._parts
    for model, arrays in zip(parts.models, state["models"], strict=True):
        assign(model.weights, arrays)
    for optimizer, arrays in zip(parts.optimizers, state["optimizers"], strict=True):
        assign(optimizer_variables(optimizer), arrays)
    operator.global_step = state.get("global_step", operator.global_step)
    operator.load_state_dict(state.get("operator"))


# -- bytes --------------------------------------------------------------------------------------------


def dump(state: dict[str, Any]) -> memoryview:
    arrays: list[np.ndarray] = []
    head = json.dumps(_encoded(state, arrays, "state"))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(HEAD, head)
        for number, array in enumerate(arrays):
            with archive.open(f"{number}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
    return buffer.getbuffer()


def parse(data: Any) -> dict[str, Any]:
    """Reads bytes, and says what is wrong with those that are not a state's."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = archive.namelist()
            if HEAD not in names:
                raise CheckpointError(f"this is not a checkpoint of a TFTrainer: the archive holds {names[:5]}")
            head = json.loads(archive.read(HEAD))
            arrays = [_array(archive.read(f"{number}.npy")) for number in range(len(names) - 1)]
        state: Any = _decoded(head, arrays)
    except (zipfile.BadZipFile, ValueError, KeyError, IndexError, EOFError) as error:
        raise CheckpointError(f"this is no whole checkpoint of a TFTrainer: it cannot be read ({error})") from error
    return shaped(state)


def shaped(state: Any) -> dict[str, Any]:
    if not isinstance(state, dict) or state.get("format") != FORMAT or not isinstance(state.get("models"), list):
        raise CheckpointError(f"this is not a checkpoint of a TFTrainer (its format would be {FORMAT!r})")
    if state.get("version", VERSION) > VERSION:
        raise CheckpointError(f"this checkpoint was written by a newer raysgd (format version {state['version']})")
    return state


def _array(data: bytes) -> np.ndarray:
    array: np.ndarray = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    return array


def _encoded(value: Any, arrays: list[np.ndarray], place: str) -> Any:
    """JSON for it; arrays go into the list. Types that NumPy's files do not know travel as raw bytes."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "numpy"):
        value = value.numpy()
    if isinstance(value, (np.ndarray, np.generic)) and np.asarray(value).dtype.kind != "O":
        array = np.asarray(value)
        plain = array.dtype.kind in "biufcSU"
        arrays.append(
            np.ascontiguousarray(array).reshape(array.shape) if plain else np.frombuffer(array.tobytes(), np.uint8)
        )
        return {
            "#": "array",
            "at": len(arrays) - 1,
            "dtype": array.dtype.name,
            "shape": list(array.shape),
            "plain": plain,
        }
    if isinstance(value, (list, tuple)):
        items = [_encoded(each, arrays, f"{place}[{number}]") for number, each in enumerate(value)]
        return items if isinstance(value, list) else {"#": "tuple", "items": items}
    if isinstance(value, dict):
        return {
            "#": "dict",
            "items": [[_encoded(k, arrays, place), _encoded(v, arrays, f"{place}[{k!r}]")] for k, v in value.items()],
        }
    raise CheckpointError(
        f"{place} is a {type(value).__name__}, which a checkpoint cannot hold: it may contain plain values, arrays, "
        "and lists, tuples and dicts of them"
    )


def _decoded(value: Any, arrays: list[np.ndarray]) -> Any:
    if isinstance(value, list):
        return [_decoded(each, arrays) for each in value]
    if not isinstance(value, dict):
        return value
    if value["#"] == "array":
        array = arrays[value["at"]]
        return array if value["plain"] else array.view(_dtype(value["dtype"])).reshape(value["shape"])
    items = [_decoded(each, arrays) for each in value["items"]]
    return tuple(items) if value["#"] == "tuple" else dict(items)


def _dtype(name: str) -> Any:
    import tensorflow as tf

    return tf.as_dtype(name).as_numpy_dtype


# -- random states ------------------------------------------------------------------------------------


def random_state() -> dict[str, Any]:
    """This process's random states, of Python and NumPy (TensorFlow's cannot be read)."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {"python": [version, list(internal), gauss], "numpy": [kind, keys, position, has_gauss, cached]}


def restore_random(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, np.uint32), position, has_gauss, cached))
