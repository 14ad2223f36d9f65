"""Reads a stored dictionary without running code from the file: plain values, arrays and tensors only.

A pickle names functions and calls them. Here it finds those that rebuild values and no others; and it gets functions in a
wrapper, and only such classes as cannot be changed, so that it cannot alter them either.
"""

from __future__ import annotations

import functools
import io
import pickle
import pickletools
import sys
from importlib import import_module
from typing import Any, ClassVar

__all__ = ["Refused", "is_dictionary", "read"]

FUNCTIONS = {
    "torch._utils": {"_rebuild_parameter", "_rebuild_tensor_v2"},
    "collections": {"Counter"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "PureWindowsPath"},
    "_codecs": {"encode"},  # bytes, in the oldest protocols
}
CLASSES = {
    "builtins": {"bytearray", "complex", "frozenset", "range", "set", "slice"},
    "collections": {"OrderedDict", "defaultdict", "deque"},
    "datetime": {"date", "datetime", "time", "timedelta", "timezone"},
    "decimal": {"Decimal"},
    "numpy": {"dtype"},
    "torch": {"Size", "device"},
}
PLAIN_FACTORIES = {"builtins": {"bool", "dict", "float", "int", "list", "str", "tuple"}}
BEGIN = ("PROTO", "FRAME")
ARRAY = object()  # stands for numpy.ndarray in the file: not to be called, only to be named


def _numpy() -> Any:
    return import_module("numpy")


def _reconstruct(function: Any, kind: Any, *arguments: Any) -> Any:
    if kind is not ARRAY:
        raise Refused("an array of another type than numpy.ndarray")
    return function(_numpy().ndarray, *arguments)


def _scalar(function: Any, dtype: Any, *data: Any) -> Any:
    return function(_without_objects(dtype), *data)


def _frombuffer(function: Any, buffer: Any, dtype: Any, *layout: Any) -> Any:
    return function(buffer, _without_objects(dtype), *layout)


def _without_objects(given: Any) -> Any:
    dtype = _numpy().dtype(given)
    if dtype.hasobject:
        raise Refused("bytes that are to be taken for objects")
    return dtype


NUMPY_FUNCTIONS = {
    "_reconstruct": ("numpy.core.multiarray", _reconstruct),
    "scalar": ("numpy.core.multiarray", _scalar),
    "_frombuffer": ("numpy.core.numeric", _frombuffer),
}


def is_dictionary(data: bytes | memoryview) -> bool:
    """Does this pickle, as its first step, make a dictionary? Only looks."""
    try:
        first = next(op.name for op, _, _ in pickletools.genops(bytes(data[:64])) if op.name not in BEGIN)
    except (ValueError, StopIteration):
        return False
    return first in ("EMPTY_DICT", "MARK")


def read(data: bytes | memoryview) -> Any:
    """What is in it; raises `Refused` for what would have to be trusted, and what pickle raises for damage."""
    return _Reader(io.BytesIO(data)).load()


class Refused(pickle.UnpicklingError):
    """The pickle wants something that could be code."""


_Python: Any = pickle._Unpickler  # of the other it cannot be seen what it builds


class _Reader(_Python):  # type: ignore[misc]
    dispatch: ClassVar[dict[int, Any]] = dict(_Python.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("numpy", "ndarray"):
            return ARRAY
        if name in NUMPY_FUNCTIONS and module.replace("._core.", ".core.") == NUMPY_FUNCTIONS[name][0]:
            return functools.partial(NUMPY_FUNCTIONS[name][1], getattr(import_module(module), name))
        if name in FUNCTIONS.get(module, ()):
            return functools.partial(getattr(import_module(module), name))
        if name in CLASSES.get(module, ()) or name in PLAIN_FACTORIES.get(module, ()):
            return getattr(import_module(module), name)
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return functools.partial(_tensor_storage)
        if module == "torch" and _is_dtype(name):
            return getattr(import_module("torch"), name)
        raise Refused(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise Refused(f"a persistent id, {pid!r:.40}")

    def load_build(self) -> None:
        """A type of numpy's tells numpy what bytes are. Told something else, it takes them for addresses of objects."""
        built, state = self.stack[-2:]
        if "numpy" in sys.modules and isinstance(built, _numpy().dtype) and not _is_own_state(built, state):
            raise Refused("a numpy.dtype with fields, or put together by hand")
        _Python.load_build(self)

    dispatch[pickle.BUILD[0]] = load_build


def _is_own_state(dtype: Any, state: Any) -> bool:
    """Does this say of a simple type what it says itself? And is it this file's own, not the one that everybody shares?"""
    if not isinstance(state, tuple) or len(state) not in (8, 9) or dtype is _numpy().dtype(dtype.char):
        return False
    _, order, *fields, size, alignment, flags = state[:8]
    return (
        order in ("<", ">", "|", "=")
        and fields == [None, None, None]
        and size in (-1, dtype.itemsize)
        and alignment in (-1, dtype.alignment)
        and flags == dtype.flags
        and (len(state) == 8 or dtype.kind in "mM")
    )


def _tensor_storage(data: bytes) -> Any:
    """What torch itself puts here would run code that is inside the bytes."""
    import torch

    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


def _is_dtype(name: str) -> bool:
    import torch

    return isinstance(getattr(torch, name, None), torch.dtype)
