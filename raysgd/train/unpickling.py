"""Reads a stored dictionary without running code from the file: plain values, arrays and tensors only.

A pickle names functions and calls them. Here it finds those that rebuild values and no others; and it gets functions in a
wrapper, and only such classes as cannot be changed, so that it cannot alter them either.
"""

from __future__ import annotations

import functools
import io
import pickle
import pickletools
from importlib import import_module
from typing import Any

__all__ = ["Refused", "is_dictionary", "read"]

FUNCTIONS = {
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
    "numpy.core.numeric": {"_frombuffer"},
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
    "numpy": {"dtype", "ndarray"},
    "torch": {"Size", "device"},
}
PLAIN_FACTORIES = {"builtins": {"bool", "dict", "float", "int", "list", "str", "tuple"}}
BEGIN = ("PROTO", "FRAME")


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


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
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


def _tensor_storage(data: bytes) -> Any:
    """What torch itself puts here would run code that is inside the bytes."""
    import torch

    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


def _is_dtype(name: str) -> bool:
    import torch

    return isinstance(getattr(torch, name, None), torch.dtype)
