"""Store a dictionary of plain values, arrays and tensors as bytes that run no code when they are
read. Both.

The bytes are a zip archive, as NumPy's npz: `state.json` has everything but the arrays, and there
is one `.npy` for each of those and for each tensor. The archive has a checksum of each of them.
Sizes that the bytes claim are checked before memory is allocated: members are stored uncompressed,
and an array is as large as its bytes.

What JSON and `.npy` files cannot hold is pickled in one more member, `objects.pkl`, which only
`trusted=True` reads.
"""

from __future__ import annotations

import datetime
import io
import json
import math
import pickle
import sys
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from raysgd.core.metrics import plain
from raysgd.errors import CheckpointError

HEAD, OBJECTS = "state.json", "objects.pkl"
MOST_NESTED = 100
ALIGNED = 16  # bytes, which the size of each element divides
MOST_BITS = 10_000  # of an integer: Python refuses to read longer ones from text
PLAIN_KINDS = "biufcSUmM"
PLAIN = (type(None), bool, int, float, str)
Dumps = Callable[[Any], bytes]
PATH = type(Path())
DICTIONARIES: dict[str, Any] = {"ordered": OrderedDict, "counter": Counter}  # torch's schedulers have counters


class NeedsTrustError(CheckpointError):
    """The bytes hold an object that only a pickle can hold."""


def dump(data: Any, *, dumps: Dumps | None = None) -> memoryview:
    """Convert the data to bytes. `dumps` pickles objects of other types; without it, they are an
    error, and subclasses are stored as what they inherit from."""
    encoder = _Encoder(dumps is not None)
    try:
        tree = encoder.encoded(data, "", 0)
        encoder.finish()
        head = json.dumps(tree).encode()
    except ValueError as error:
        raise CheckpointError(f"the state cannot be written ({error})") from error
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(_member(HEAD), head)
        for number, array in enumerate(encoder.arrays):
            with archive.open(_member(f"{number}.npy"), "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
        if encoder.objects and dumps is not None:
            archive.writestr(_member(OBJECTS), dumps(encoder.objects))
    return buffer.getbuffer()


def _member(name: str) -> zipfile.ZipInfo:
    """A member without the time, so that equal data are equal bytes."""
    return zipfile.ZipInfo(name)


def load(data: Any, *, trusted: bool = False) -> Any:
    """Load what `dump` stored. Raise CheckpointError if the bytes are damaged or something else,
    and `NeedsTrustError`, with the first object that had to be pickled, if there is one and the
    bytes are not `trusted`."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            names = [member.filename for member in _stored(archive, memoryview(data).nbytes)]
            if HEAD not in names:
                raise CheckpointError(f"it holds {names[:5]}, and no {HEAD}")
            count = len(names) - 1 - (OBJECTS in names)
            decoder = _Decoder([_array(archive.read(f"{number}.npy"), number) for number in range(count)])
            pickled = archive.read(OBJECTS) if OBJECTS in names else None
            head = json.loads(archive.read(HEAD))
        if pickled is not None and trusted:
            decoder.objects = pickle.loads(pickled)
        return decoder.decoded(head, 0)
    except (CheckpointError, ModuleNotFoundError):
        raise
    except Exception as error:  # zipfile, json and numpy raise various errors for damaged archives
        raise CheckpointError(f"it cannot be read ({str(error) or type(error).__name__})") from error


def plain_values(data: Any, number: str | None = None) -> dict[str, Any]:
    """The plain values of a stored dictionary, and `...` for all others. Of arrays and tensors,
    only the one under the name `number` is read, if it has one element."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        found: dict[str, Any] = {}
        for key, value in json.loads(archive.read(HEAD))["items"]:
            is_entry = isinstance(value, dict) and value.get("#") in ("array", "tensor")
            if is_entry and key == number and math.prod(value["shape"]) == 1:
                array = _array(archive.read(f"{value['at']}.npy"), value["at"])
                value = plain(_Decoder([array]).decoded({**value, "at": 0}, 0))
            found[str(key)] = ... if isinstance(value, (dict, list)) else value
        return found


def is_stored(data: Any) -> bool:
    """Whether `dump` may have returned these bytes."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return HEAD in archive.namelist()
    except Exception:  # zipfile raises various errors for other files
        return False


def _stored(archive: zipfile.ZipFile, size: int) -> Iterator[zipfile.ZipInfo]:
    """Yield the members, if they are stored uncompressed and within the file's size."""
    names: set[str] = set()
    left = size
    for member in archive.infolist():
        left -= member.file_size
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size or left < 0:
            raise CheckpointError(
                f"{member.filename!r:.60} is compressed, or larger than the {size} bytes that there are"
            )
        if member.filename in names:
            raise CheckpointError(f"it holds {member.filename!r:.60} twice")
        names.add(member.filename)
        yield member


def _array(data: bytes, number: int) -> np.ndarray:
    """Read an array if as many bytes follow as its header claims, which NumPy allocates."""
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
    shape, by_columns, dtype = read_header(file)
    left = len(data) - file.tell()
    if dtype.kind not in PLAIN_KINDS or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != left:
        raise CheckpointError(f"{number}.npy claims an array of {dtype} of shape {shape}, and has {left} bytes")
    if not left:
        return np.zeros(shape, dtype)
    flat = np.frombuffer(data, dtype, offset=file.tell()).copy()
    return flat.reshape(shape, order="F" if by_columns else "C")


class _Encoder:
    """Converts values to JSON. Collects arrays and, if allowed, objects to pickle."""

    def __init__(self, pickles: bool) -> None:
        self._pickles = pickles
        self.arrays: list[np.ndarray] = []
        self._added: dict[int, tuple[Any, int]] = {}  # arrays by their identities, so that the same one is added once
        self._tensors: dict[tuple[str, int], list[tuple[dict[str, Any], Any]]] = {}  # by their memory
        self.objects: list[Any] = []

    def encoded(self, value: Any, place: str, depth: int) -> Any:
        kind = type(value)
        if kind in PLAIN and (kind is not int or value.bit_length() <= MOST_BITS):
            return value
        if not self._pickles and isinstance(value, (float, str)) and not isinstance(value, np.generic):
            return value
        if depth < MOST_NESTED:
            found = self._container(value, kind, place, depth + 1)
            found = self._leaf(value, kind) if found is None else found
            if found is not None:
                return found
        if not self._pickles:
            raise CheckpointError(
                f"state{place[:60]} is a {kind.__name__}{' too deep inside' if depth >= MOST_NESTED else ''}, which a checkpoint "
                f"cannot hold: it may contain plain values, arrays, and lists, tuples and dicts of them, {MOST_NESTED} levels deep"
            )
        self.objects.append(value)
        return {
            "#": "object",
            "at": len(self.objects) - 1,
            "is": f"a {kind.__module__}.{kind.__qualname__} at {place[:200]}",
        }

    def _container(self, value: Any, kind: type, place: str, depth: int) -> Any:
        if kind is list or (isinstance(value, list) and not self._pickles):
            if all(type(each) in PLAIN and type(each) is not int for each in value):
                return value
            return [self.encoded(each, f"{place}[{number}]", depth) for number, each in enumerate(value)]
        if kind is tuple or (isinstance(value, tuple) and not self._pickles):
            return {"#": "tuple", "items": self.encoded(list(value), place, depth)}
        if kind in (set, frozenset):
            return {"#": kind.__name__, "items": self.encoded(list(value), place, depth)}
        if kind in (dict, *DICTIONARIES.values()) or (isinstance(value, Mapping) and not self._pickles):
            pairs = [
                [self.encoded(key, f"{place}, in a key", depth), self.encoded(each, f"{place}[{key!r:.60}]", depth)]
                for key, each in value.items()
            ]
            made = {"#": next((name for name, each in DICTIONARIES.items() if kind is each), "dict"), "items": pairs}
            # torch keeps the versions of modules in an attribute of a model's state.
            has_more = kind is OrderedDict and vars(value)
            return {**made, "with": self.encoded(vars(value), place, depth)} if has_more else made
        return None

    def _leaf(self, value: Any, kind: type) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and self._pickles:
            if kind in (torch.Tensor, torch.nn.Parameter):
                return self._tensor(torch, value)
            if kind in (torch.dtype, torch.device):
                return {"#": f"torch.{kind.__name__}", "is": str(value).removeprefix("torch.")}
            if kind is torch.Size:
                return {"#": "torch.Size", "is": list(value)}
        if not self._pickles and hasattr(value, "numpy"):  # of TensorFlow
            value = value.numpy()
        if isinstance(value, np.generic) or type(value) is np.ndarray:
            return self._of_numpy(np.asarray(value), scalar=isinstance(value, np.generic))
        if kind in (bytes, bytearray):
            return {"#": kind.__name__, "at": self._add(np.frombuffer(value, np.uint8))}
        if kind is complex:
            return {"#": "complex", "is": [value.real, value.imag]}
        if kind is range:
            return {"#": "range", "is": [value.start, value.stop, value.step]}
        if kind is PATH:
            return {"#": "path", "is": str(value)}
        if kind is datetime.datetime and type(value.tzinfo) in (type(None), datetime.timezone):
            return {"#": "datetime", "is": value.isoformat()}
        if kind is datetime.timedelta:
            return {"#": "timedelta", "is": [value.days, value.seconds, value.microseconds]}
        if isinstance(value, np.dtype) and value.kind in PLAIN_KINDS:
            return {"#": "dtype", "is": value.str}
        return None

    def _add(self, array: np.ndarray) -> int:
        if id(array) in self._added:
            return self._added[id(array)][1]
        self._added[id(array)] = array, len(self.arrays)
        self.arrays.append(np.ascontiguousarray(array).reshape(array.shape))
        return len(self.arrays) - 1

    def _of_numpy(self, array: np.ndarray, *, scalar: bool) -> Any:
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

    def _tensor(self, torch: Any, tensor: Any) -> Any:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or vars(tensor):
            return None
        entry: dict[str, Any] = {
            "#": "tensor",
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
        }
        entry |= {"grad": tensor.requires_grad, "parameter": type(tensor) is torch.nn.Parameter}
        plain = tensor.detach()
        if plain.is_conj() or plain.is_neg() or not plain.numel():
            entry["at"] = self._add(_of_tensor(torch, plain))
        else:
            place = (str(plain.device), plain.untyped_storage().data_ptr())
            self._tensors.setdefault(place, []).append((entry, plain))
        return entry

    def finish(self) -> None:
        """Add the arrays of tensors. Those that share memory, as views do, share an array."""
        for sharing in self._tensors.values():
            torch: Any = sys.modules["torch"]
            if len(sharing) == 1:
                entry, tensor = sharing[0]
                entry["at"] = self._add(_of_tensor(torch, tensor))
                continue
            spans = [_span(tensor) for _, tensor in sharing]
            first, end = min(spans)[0] // ALIGNED * ALIGNED, max(end for _, end in spans)
            storage = sharing[0][1].untyped_storage()
            memory = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            at = self._add(memory[first:end].cpu().numpy())
            for entry, tensor in sharing:
                offset = tensor.storage_offset() - first // tensor.element_size()
                entry |= {"at": at, "offset": offset, "strides": list(tensor.stride())}


def _of_tensor(torch: Any, tensor: Any) -> np.ndarray:
    here = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    try:
        return np.asarray(here.numpy())
    except TypeError:  # NumPy has no bfloat16
        return np.asarray(here.flatten().view(torch.uint8).numpy())


def _span(tensor: Any) -> tuple[int, int]:
    """The first byte of a tensor in its storage, and the one after its last."""
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first, size = tensor.storage_offset(), tensor.element_size()
    return first * size, (first + last + 1) * size


class _Decoder:
    """Converts JSON back to values."""

    def __init__(self, arrays: list[np.ndarray]) -> None:
        self._arrays = arrays
        self._shared: dict[int, Any] = {}  # storages of tensors
        self.objects: list[Any] | None = None

    def decoded(self, value: Any, depth: int) -> Any:
        if depth > 3 * MOST_NESTED:
            raise ValueError(f"its values are nested deeper than {MOST_NESTED} levels")
        if isinstance(value, list):
            return [self.decoded(each, depth + 1) for each in value]
        if not isinstance(value, dict):
            return value
        kind = value["#"]
        if kind == "dict" or kind in DICTIONARIES:
            return self._dictionary(value, kind, depth)
        if kind in ("tuple", "set", "frozenset"):
            if not isinstance(value["items"], list):
                raise ValueError(f"a {kind} in it holds {value['items']!r:.60}")
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](self.decoded(value["items"], depth + 1))
        if kind == "object":
            if self.objects is None:
                raise NeedsTrustError(str(value["is"]))
            return self.objects[value["at"]]
        if kind in ("bytes", "bytearray"):
            content = self._at(value).tobytes()
            return bytearray(content) if kind == "bytearray" else content
        if kind == "array":
            array = _typed(self._at(value), value)
            return array[()] if value.get("scalar") else array
        return (
            self._torch(kind, value) if kind == "tensor" or str(kind).startswith("torch.") else _leaf(kind, value["is"])
        )

    def _at(self, value: dict[str, Any]) -> np.ndarray:
        at = value["at"]
        if type(at) is not int or not 0 <= at < len(self._arrays):
            raise ValueError(f"it has {len(self._arrays)} arrays, and refers to number {at!r:.60}")
        return self._arrays[at]

    def _dictionary(self, value: dict[str, Any], kind: str, depth: int) -> Any:
        found: Any = DICTIONARIES.get(kind, dict)()
        for key, each in value["items"]:
            key = self.decoded(key, depth + 1)
            if key in found:
                raise ValueError("a dictionary in it has one key twice")
            found[key] = self.decoded(each, depth + 1)
        if "with" in value:
            attributes = self.decoded(value["with"], depth + 1)
            if set(attributes) - {"_metadata"} or not isinstance(attributes.get("_metadata", {}), Mapping):
                raise ValueError(f"a dictionary in it has the attributes {list(attributes)!r:.60}")
            vars(found).update(attributes)
        return found

    def _torch(self, kind: str, value: dict[str, Any]) -> Any:
        import torch

        if kind == "torch.Size":
            return torch.Size(value["is"])
        if kind == "torch.device":
            return torch.device(value["is"])
        dtype = getattr(torch, value["is"] if kind == "torch.dtype" else value["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{dtype!r:.60} is not a type of tensors")
        if kind == "torch.dtype":
            return dtype
        found = torch.from_numpy(self._at(value))
        if "strides" in value:  # by the storage, what is saved from here knows again that they share it
            storage = self._shared.setdefault(value["at"], found.untyped_storage())
            found = torch.empty(0, dtype=dtype).set_(storage, value["offset"], value["shape"], value["strides"])
        found = found if found.dtype == dtype else found.view(dtype).reshape(value["shape"])
        if list(found.shape) != value["shape"]:
            raise ValueError(f"a tensor in it has shape {tuple(found.shape)}, and {value['shape']!r:.60} was saved")
        if value["parameter"]:
            return torch.nn.Parameter(found, requires_grad=value["grad"])
        return found.requires_grad_(value["grad"])


def _leaf(kind: Any, said: Any) -> Any:
    if kind == "complex":
        return complex(*said)
    if kind == "range":
        return range(*said)
    if kind == "path":
        return Path(said)
    if kind == "datetime":
        return datetime.datetime.fromisoformat(said)
    if kind == "timedelta":
        return datetime.timedelta(*said)
    if kind == "dtype":
        return np.dtype(said)
    raise ValueError(f"it holds a {kind!r:.60}, which is not known here")


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
