"""A dictionary of plain values and arrays as bytes that run no code when they are read. Both.

The bytes are a zip archive, as NumPy's npz: `state.json` has everything but the arrays, and there
is one `.npy` for each of those. The archive has a checksum of each of them. Sizes that the bytes
claim are checked before memory is allocated: members are stored uncompressed, and an array is as
large as its bytes.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from raysgd.errors import CheckpointError
from raysgd.storage import checksums
from raysgd.storage.seen import opened

HEAD = "state.json"
MOST_NESTED = 100
MOST_BITS = 10_000  # of an integer: Python refuses to read longer ones from text
PLAIN_KINDS = "biufcSUmM"
SEVERAL = {"tuple": tuple, "set": set, "frozenset": frozenset}


def dump(data: Any) -> memoryview:
    """Convert the data to bytes. Subclasses are stored as what they inherit from."""
    encoder = _Encoder()
    try:
        head = json.dumps(encoder.encoded(data, "", 0)).encode()
    except ValueError as error:
        raise CheckpointError(f"the state cannot be written ({error})") from error
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(_member(HEAD), head)
        for number, array in enumerate(encoder.arrays):
            with archive.open(_member(f"{number}.npy"), "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
    return buffer.getbuffer()


def _member(name: str) -> zipfile.ZipInfo:
    """A member without the time, so that equal data are equal bytes."""
    return zipfile.ZipInfo(name)


def load(data: Any) -> Any:
    """Load what `dump` stored. Raise CheckpointError if the bytes are damaged or something else."""
    try:
        names = [member.filename for member, _ in checksums.members(data)]
        with zipfile.ZipFile(opened(data)) as archive:
            if HEAD not in names:
                raise CheckpointError(f"it holds {names[:5]}, and no {HEAD}")
            arrays = [_array(archive.read(f"{number}.npy"), number) for number in range(len(names) - 1)]
            return _Decoder(arrays).decoded(json.loads(archive.read(HEAD)), 0)
    except CheckpointError:
        raise
    except Exception as error:  # zipfile, json and numpy raise various errors for damaged archives
        raise CheckpointError(f"it cannot be read ({str(error) or type(error).__name__})") from error


def _array(data: bytes, number: int) -> np.ndarray:
    """Read an array if as many bytes follow as its header claims, which NumPy allocates."""
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
    shape, by_columns, dtype = read_header(file)
    rest = len(data) - file.tell()
    if dtype.kind not in PLAIN_KINDS or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != rest:
        raise CheckpointError(f"{number}.npy claims an array of {dtype} of shape {shape}, and has {rest} bytes")
    if not rest:
        return np.zeros(shape, dtype)
    flat = np.frombuffer(data, dtype, offset=file.tell()).copy()
    return flat.reshape(shape, order="F" if by_columns else "C")


class _Encoder:
    """Converts values to JSON, and collects arrays."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []
        self._added: dict[int, tuple[Any, int]] = {}  # arrays by their identities, so that the same one is added once

    def encoded(self, value: Any, place: str, depth: int) -> Any:
        if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, np.generic)):
            if not isinstance(value, int) or value.bit_length() <= MOST_BITS:
                return value
        elif depth < MOST_NESTED and (container := self._container(value, place, depth + 1)) is not None:
            return container
        kind = type(value).__name__
        raise CheckpointError(
            f"state{place[:60]} is a {kind}{' too deep inside' if depth >= MOST_NESTED else ''}, which a checkpoint "
            f"cannot hold: it may contain plain values, arrays, and lists, tuples and dicts of them, {MOST_NESTED} levels deep"
        )

    def _container(self, value: Any, place: str, depth: int) -> Any:
        if isinstance(value, list):
            return [self.encoded(each, f"{place}[{number}]", depth) for number, each in enumerate(value)]
        for name, kind in SEVERAL.items():
            if isinstance(value, kind):
                return {"#": name, "items": self.encoded(list(value), place, depth)}
        if isinstance(value, Mapping):
            pairs = [
                [self.encoded(key, f"{place}, in a key", depth), self.encoded(each, f"{place}[{key!r:.60}]", depth)]
                for key, each in value.items()
            ]
            return {"#": "dict", "items": pairs}
        if isinstance(value, bytes):
            return {"#": "bytes", "at": self._add(np.frombuffer(value, np.uint8))}
        if hasattr(value, "numpy"):  # of TensorFlow
            value = value.numpy()
        if isinstance(value, np.generic) or type(value) is np.ndarray:
            return self._array(np.asarray(value), scalar=isinstance(value, np.generic))
        return None

    def _add(self, array: np.ndarray) -> int:
        if id(array) in self._added:
            return self._added[id(array)][1]
        self._added[id(array)] = array, len(self.arrays)
        self.arrays.append(np.ascontiguousarray(array).reshape(array.shape))
        return len(self.arrays) - 1

    def _array(self, array: np.ndarray, *, scalar: bool) -> Any:
        """Make the entry of an array; types that .npy lacks, such as bfloat16, are raw bytes."""
        if (
            array.dtype.hasobject
            or array.dtype.names is not None
            or (array.dtype.kind == "V" and array.dtype.name[:4] == "void")
        ):
            return None
        plain = array.dtype.kind in PLAIN_KINDS
        at = self._add(array if plain else np.frombuffer(array.tobytes(), np.uint8))
        entry = {"#": "array", "at": at, "dtype": array.dtype.name, "shape": list(array.shape), "plain": plain}
        return {**entry, "scalar": True} if scalar else entry


class _Decoder:
    """Converts JSON back to values."""

    def __init__(self, arrays: list[np.ndarray]) -> None:
        self._arrays = arrays

    def decoded(self, value: Any, depth: int) -> Any:
        if depth > 3 * MOST_NESTED:
            raise ValueError(f"its values are nested deeper than {MOST_NESTED} levels")
        if isinstance(value, list):
            return [self.decoded(each, depth + 1) for each in value]
        if not isinstance(value, dict):
            return value
        kind = value["#"]
        if kind == "dict":
            return self._dictionary(value, depth)
        if kind in SEVERAL:
            if not isinstance(value["items"], list):
                raise ValueError(f"a {kind} in it holds {value['items']!r:.60}")
            return SEVERAL[kind](self.decoded(value["items"], depth + 1))
        if kind == "bytes":
            return self._at(value).tobytes()
        if kind == "array":
            array = _typed(self._at(value), value)
            return array[()] if value.get("scalar") else array
        raise ValueError(f"it holds a {kind!r:.60}, which is not known here")

    def _at(self, value: dict[str, Any]) -> np.ndarray:
        at = value["at"]
        if type(at) is not int or not 0 <= at < len(self._arrays):
            raise ValueError(f"it has {len(self._arrays)} arrays, and refers to number {at!r:.60}")
        return self._arrays[at]

    def _dictionary(self, value: dict[str, Any], depth: int) -> Any:
        result: dict[Any, Any] = {}
        for key, each in value["items"]:
            key = self.decoded(key, depth + 1)
            if key in result:
                raise ValueError("a dictionary in it has one key twice")
            result[key] = self.decoded(each, depth + 1)
        return result


def _typed(array: np.ndarray, said: dict[str, Any]) -> np.ndarray:
    """The array with the type that was saved, which .npy files may not have."""
    if not said["plain"]:
        import ml_dtypes  # has the types that NumPy lacks; TensorFlow and JAX bring it

        dtype = np.dtype(getattr(ml_dtypes, said["dtype"]))
        if dtype.kind in PLAIN_KINDS or dtype.hasobject:
            raise ValueError(f"an array in it has another type than {said['dtype']!r:.60}")
        array = array.view(dtype).reshape(said["shape"])
    if list(array.shape) != said["shape"] or array.dtype.name != said["dtype"]:
        raise ValueError(f"an array in it is {array.dtype} of shape {array.shape}, and {said['dtype']!r:.60} was saved")
    return array
