"""Reads a stored dictionary without running code from the file: plain values, arrays and tensors only.

A pickle names functions and calls them. Here it finds those that rebuild values and no others, each is called with what
it is called with for real values only, and nothing is made that is much larger than the file. Lengths that the file
claims are not believed.
"""

from __future__ import annotations

import collections
import functools
import io
import pickle
import pickletools
import re
import struct
from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar

from raysgd.train.rebuilding import FUNCTIONS, Refused, Rule, check_array_state, check_keys, is_own_state, rule_of
from raysgd.train.rebuilding import numpy as _numpy

__all__ = ["Refused", "is_dictionary", "read"]

CLASSES = {
    "builtins": {"bytearray", "complex", "frozenset", "range", "set", "slice"},
    "collections": {"Counter", "OrderedDict", "defaultdict", "deque"},
    "datetime": {"date", "datetime", "time", "timedelta", "timezone"},
    "decimal": {"Decimal"},
    "numpy": {"dtype", "ndarray"},
    "torch": {"Size", "device"},
}
# May be named, as the factory of a defaultdict, and not called: list(range(10**12)) is a short pickle.
PLAIN_FACTORIES = {"builtins": {"bool", "dict", "float", "int", "list", "str", "tuple"}}
BEGIN = ("PROTO", "FRAME")
# What calls copy may be as long as the file, and some more: each part of a real file is copied once.
COPIES, FREE = 2, 64 << 10
MOVES = {"numpy._core.": "numpy.core.", "pathlib._local": "pathlib"}  # newer names, and older ones that mean the same
MOVED = re.compile("|".join(f"^{re.escape(each)}" for each in MOVES))


def _newer(module: str) -> str:
    """Older names of numpy's work, with a warning."""
    numpy_2 = module.startswith("numpy.core.") and int(_numpy().__version__.partition(".")[0]) >= 2
    return module.replace("numpy.core.", "numpy._core.") if numpy_2 else module


class _Function:
    """What a pickle gets for a function that it names: it can be called as the rule says, and not be altered."""

    __slots__ = ("called", "function", "name", "rule")

    def __init__(self, name: str, function: Any, rule: Rule) -> None:
        self.name, self.function, self.rule, self.called = name, function, rule, False


def is_dictionary(data: bytes | memoryview) -> bool:
    """Does this pickle, as its first step, make a dictionary? Only looks."""
    try:
        first = next(op.name for op, _, _ in pickletools.genops(bytes(data[:64])) if op.name not in BEGIN)
    except (ValueError, StopIteration):
        return False
    return first in ("EMPTY_DICT", "MARK")


def read(data: bytes | memoryview) -> Any:
    """What is in it; raises `Refused` for what would have to be trusted, and what pickle raises for damage."""
    return _Reader(data).load()


_Python: Any = pickle._Unpickler  # of the other it cannot be seen what it builds


class _Reader(_Python):  # type: ignore[misc]
    dispatch: ClassVar[dict[int, Any]] = dict(_Python.dispatch)

    def __init__(self, data: Any) -> None:
        super().__init__(io.BytesIO(data))
        self._size, self._left = len(data), COPIES * len(data) + FREE
        self._functions: list[_Function] = []

    def load(self) -> Any:
        content = super().load()
        for function in self._functions:
            if not function.called:
                raise Refused(f"{function.name} itself")
        return content

    def find_class(self, module: str, name: str) -> Any:
        full = f"{MOVED.sub(lambda match: MOVES[match.group()], module)}.{name}"
        if full in FUNCTIONS:
            real = (
                _storage_of
                if full == "torch.storage._load_from_bytes"
                else getattr(import_module(_newer(module)), name)
            )
            self._functions.append(_Function(full, real, FUNCTIONS[full]))
            return self._functions[-1]
        if name in CLASSES.get(module, ()) or name in PLAIN_FACTORIES.get(module, ()):
            return getattr(import_module(module), name)
        if module == "torch":
            torch = import_module("torch")
            if isinstance(found := vars(torch).get(name), torch.dtype):
                return found
        raise Refused(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise Refused(f"a persistent id, {pid!r:.40}")

    def _spend(self, cost: int) -> None:
        self._left -= cost
        if self._left < 0:
            raise Refused("copies of its parts, which take much more memory than the file")

    def load_reduce(self) -> None:
        args = self.stack.pop()
        function = self.stack[-1]
        if not isinstance(args, tuple):
            raise Refused("a call without arguments")
        if isinstance(function, _Function):
            self._spend(function.rule(*args))
            function.called, function = True, function.function
        elif isinstance(function, type):
            self._spend(rule_of(function)(*args))
            check_keys(args[0] if args and function in (set, frozenset) else ())
        else:
            raise Refused(f"a call of a {type(function).__name__}")
        self.stack[-1] = function(*args)

    def load_build(self) -> None:
        """A type of numpy's tells numpy what bytes are. Told something else, it takes them for addresses of objects."""
        built, state = self.stack[-2:]
        kind = type(built)
        if kind is collections.OrderedDict and type(state) is dict:
            pass  # attributes, as torch's state dictionaries have
        elif kind.__module__.partition(".")[0] == "numpy" and isinstance(built, _numpy().dtype):
            if not is_own_state(built, state):
                raise Refused("a numpy.dtype with fields, or put together by hand")
        elif kind.__module__ == "numpy" and kind is _numpy().ndarray:
            self._spend(check_array_state(state))
        else:
            raise Refused(f"a state for a {kind.__name__}")
        _Python.load_build(self)

    def _refuse_making(self, how: str) -> None:
        raise Refused(f"an object that is made in another way than values are ({how})")

    def load_bytearray8(self) -> None:
        """pickle makes room for as many bytes as the file claims."""
        (size,) = struct.unpack("<Q", self.read(8))
        content = self.read(min(size, self._size))
        if len(content) != size:
            raise pickle.UnpicklingError(f"it ends in the middle of {size} bytes")
        self.append(bytearray(content))

    def load_frame(self) -> None:
        (size,) = struct.unpack("<Q", self.read(8))
        if size > self._size:
            raise pickle.UnpicklingError(f"it ends in the middle of {size} bytes")
        self._unframer.load_frame(size)

    def _adding(self, target: Any, kinds: tuple[type, ...], keys: Any) -> None:
        if type(target) not in kinds:
            raise Refused(f"values for a {type(target).__name__}")
        check_keys(keys)


DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
LISTS = (list, collections.deque)


def _guarded(opcode: bytes, check: Callable[[_Reader], None]) -> None:
    """Call `check` before pickle's own method for an opcode."""
    own = _Python.dispatch[opcode[0]]

    def method(reader: _Reader) -> None:
        check(reader)
        own(reader)

    _Reader.dispatch[opcode[0]] = method


_Reader.dispatch |= {
    pickle.REDUCE[0]: _Reader.load_reduce,
    pickle.BUILD[0]: _Reader.load_build,
    pickle.BYTEARRAY8[0]: _Reader.load_bytearray8,
    pickle.FRAME[0]: _Reader.load_frame,
}
for _name in ("INST", "OBJ", "NEWOBJ", "NEWOBJ_EX"):
    _Reader.dispatch[getattr(pickle, _name)[0]] = functools.partial(_Reader._refuse_making, how=_name)
# Of values that come between a mark and their container, the container is the last one before the mark.
_guarded(pickle.APPEND, lambda it: it._adding(it.stack[-2], LISTS, ()))
_guarded(pickle.APPENDS, lambda it: it._adding(it.metastack[-1][-1], LISTS, ()))
_guarded(pickle.SETITEM, lambda it: it._adding(it.stack[-3], DICTS, it.stack[-2:-1]))
_guarded(pickle.SETITEMS, lambda it: it._adding(it.metastack[-1][-1], DICTS, it.stack[::2]))
_guarded(pickle.ADDITEMS, lambda it: it._adding(it.metastack[-1][-1], (set,), it.stack))
_guarded(pickle.DICT, lambda it: check_keys(it.stack[::2]))
_guarded(pickle.FROZENSET, lambda it: check_keys(it.stack))


def _storage_of(data: bytes) -> Any:
    """What torch itself puts here would run code that is inside the bytes."""
    import torch

    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
