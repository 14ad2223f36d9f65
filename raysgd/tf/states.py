"""A replica's state as a dictionary of plain values and arrays, and as bytes that run no code when read. Both.

The bytes are a zip archive (as NumPy's npz): `state.json` with everything but the arrays, and one `.npy` for each of
those. The archive has a checksum of each member. Sizes that the bytes claim are checked before memory is allocated: members
are stored uncompressed, and an array is as large as its bytes.
"""

from __future__ import annotations

import io
import json
import math
import random
import zipfile
from collections.abc import Iterator
from typing import Any

import numpy as np

from raysgd.errors import CheckpointError
from raysgd.tf.parts import assign, optimizer_variables, values
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
HEAD = "state.json"
MOST_NESTED = 100
MOST_HEAD_BYTES = 256 << 20
PLAIN_KINDS = "biufcSU"


def gather(operator: Any) -> dict[str, Any]:
    """Return models, optimizers with their slots, and the operator's own state, as copies."""
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
    return np.dtype(_dtype(variable.dtype)).name, tuple(variable.shape)


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
    arrays: list[np.ndarray] = []
    try:
        head = json.dumps(_encoded(state, arrays, "state")).encode()
    except ValueError as error:
        raise CheckpointError(f"the state cannot be written ({error})") from error
    if len(head) > MOST_HEAD_BYTES:
        raise CheckpointError(
            f"the operator's state_dict is {len(head)} bytes of plain values, and a checkpoint holds at most "
            f"{MOST_HEAD_BYTES}: keep long lists of numbers in NumPy arrays"
        )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(HEAD, head)
        for number, array in enumerate(arrays):
            with archive.open(f"{number}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
    return buffer.getbuffer()


def parse(data: Any) -> dict[str, Any]:
    """Return the state in these bytes. Raise CheckpointError if they are damaged, or not a checkpoint."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {member.filename: member for member in _stored(archive, memoryview(data).nbytes)}
            if HEAD not in members:
                raise CheckpointError(f"this is not a checkpoint of a TFTrainer: the archive holds {list(members)[:5]}")
            if members[HEAD].file_size > MOST_HEAD_BYTES:
                raise CheckpointError(f"this is not a checkpoint of a TFTrainer: {HEAD} is too large")
            head = json.loads(archive.read(HEAD))
            arrays = [_array(archive.read(f"{number}.npy"), number) for number in range(len(members) - 1)]
        state: Any = _decoded(head, arrays, 0)
    except CheckpointError:
        raise
    except Exception as error:  # zipfile, json and numpy raise various errors for damaged archives
        said = str(error) or type(error).__name__
        raise CheckpointError(f"not a complete checkpoint of a TFTrainer: it cannot be read ({said})") from error
    return shaped(state)


def _stored(archive: zipfile.ZipFile, size: int) -> Iterator[zipfile.ZipInfo]:
    """Yield the archive's members. Raise CheckpointError unless they are stored uncompressed, within the file's size."""
    names: set[str] = set()
    left = size
    for member in archive.infolist():
        left -= member.file_size
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size or left < 0:
            raise CheckpointError(
                f"not a complete checkpoint of a TFTrainer: {member.filename!r:.60} is not stored in it as save() does, "
                f"uncompressed and within the file's {size} bytes"
            )
        if member.filename in names:
            raise CheckpointError(f"not a complete checkpoint of a TFTrainer: it holds {member.filename!r:.60} twice")
        names.add(member.filename)
        yield member


def shaped(state: Any) -> dict[str, Any]:
    if not isinstance(state, dict) or state.get("format") != FORMAT or not isinstance(state.get("models"), list):
        raise CheckpointError(f"this is not a checkpoint of a TFTrainer (its format would be {FORMAT!r})")
    version = state.get("version")
    if type(version) is not int or version < 1:
        raise CheckpointError(f"this is not a checkpoint of a TFTrainer: its format version is {version!r:.60}")
    if version > VERSION:
        raise CheckpointError(f"this checkpoint was written by a newer raysgd (format version {version})")
    return state


def _array(data: bytes, number: int) -> np.ndarray:
    """Return an array if its header claims as many bytes as follow it. (NumPy allocates what the header claims.)"""
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
    shape, by_columns, dtype = read_header(file)
    left = len(data) - file.tell()
    if dtype.kind not in PLAIN_KINDS or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != left:
        raise CheckpointError(
            f"not a complete checkpoint of a TFTrainer: {number}.npy claims an array of {dtype} of shape {shape}, and "
            f"has {left} bytes"
        )
    if not left:
        return np.zeros(shape, dtype)
    flat = np.frombuffer(data, dtype, offset=file.tell()).copy()
    return flat.reshape(shape, order="F" if by_columns else "C")


def _encoded(value: Any, arrays: list[np.ndarray], place: str, depth: int = 0) -> Any:
    """Return a value as JSON, and append its arrays to the list. Types that .npy files do not have are raw bytes."""
    if depth > MOST_NESTED:
        raise CheckpointError(
            f"{place[:60]}... is nested deeper than {MOST_NESTED} levels, which a checkpoint cannot hold"
        )
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "numpy"):
        value = value.numpy()
    if isinstance(value, (np.ndarray, np.generic)) and np.asarray(value).dtype.kind != "O":
        array = np.asarray(value)
        plain = array.dtype.kind in PLAIN_KINDS
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
        items = [_encoded(each, arrays, f"{place}[{number}]", depth + 1) for number, each in enumerate(value)]
        return items if isinstance(value, list) else {"#": "tuple", "items": items}
    if isinstance(value, dict):
        return {
            "#": "dict",
            "items": [
                [_encoded(k, arrays, place, depth + 1), _encoded(v, arrays, f"{place}[{k!r}]", depth + 1)]
                for k, v in value.items()
            ],
        }
    raise CheckpointError(
        f"{place} is a {type(value).__name__}, which a checkpoint cannot hold: it may contain plain values, arrays, "
        "and lists, tuples and dicts of them"
    )


def _decoded(value: Any, arrays: list[np.ndarray], depth: int) -> Any:
    if depth > MOST_NESTED:
        raise ValueError(f"its values are nested deeper than {MOST_NESTED} levels")
    if isinstance(value, list):
        return [_decoded(each, arrays, depth + 1) for each in value]
    if not isinstance(value, dict):
        return value
    if value["#"] == "array":
        at = value["at"]
        if type(at) is not int or not 0 <= at < len(arrays):
            raise ValueError(f"there is no array {at!r:.60} in it")
        return _typed(arrays[at], value)
    if value["#"] == "tuple":
        return tuple(_decoded(each, arrays, depth + 1) for each in value["items"])
    if value["#"] != "dict":
        raise ValueError(f"it holds a {value['#']!r:.60}, which is not known here")
    pairs = [[_decoded(each, arrays, depth + 1) for each in pair] for pair in value["items"]]
    found = {key: each for key, each in pairs}
    if len(found) < len(pairs):
        raise ValueError("a dictionary in it has one key twice")
    return found


def _typed(array: np.ndarray, said: dict[str, Any]) -> np.ndarray:
    """Return the array with the type that was saved, which .npy files may not have."""
    if not said["plain"]:
        dtype = np.dtype(_dtype(said["dtype"]))
        if dtype.kind in PLAIN_KINDS or dtype.hasobject:
            raise ValueError(f"an array in it has another type than {said['dtype']!r:.60}")
        array = array.view(dtype).reshape(said["shape"])
    if list(array.shape) != said["shape"] or array.dtype.name != said["dtype"]:
        raise ValueError(f"an array in it is {array.dtype} of shape {array.shape}, and {said['dtype']!r:.60} was saved")
    return array


def _dtype(name: Any) -> Any:
    import tensorflow as tf

    return tf.as_dtype(name).as_numpy_dtype


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
