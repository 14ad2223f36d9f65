"""Reads a stored dictionary without running code from the file: plain values, arrays and tensors only. Both.

A pickle names functions and calls them. This reader finds only the functions and classes that rebuild values, and calls
each only with the arguments that real values have (the rules below). It creates nothing that is much larger than the
file, and does not trust the lengths that the file claims. Each rule raises `UnsafePickleError`, or returns how much
memory the call copies.
"""

from __future__ import annotations

import collections
import datetime
import functools
import io
import math
import pickle
import pickletools
import re
import struct
from collections.abc import Callable
from importlib import import_module
from typing import Any, ClassVar

__all__ = ["UnsafePickleError", "is_dictionary", "read"]

SHORT = 4096
LARGEST_KEY = 1000  # values in nested tuples: hashing visits each of them, as often as it occurs
NAME_OF_STORAGE = re.compile(r"torch(\.\w+)* \w*Storage")


class UnsafePickleError(pickle.UnpicklingError):
    """The pickle asks for something that could run code, or for more memory than a real one."""


COPIED = (bytes, bytearray, str, list, tuple, dict)
Rule = Callable[..., int]


def _numpy() -> Any:
    """Return NumPy, which may not be installed."""
    return import_module("numpy")


def _only(args: tuple[Any, ...], *kinds: Any, least: int = 0) -> int:
    """Require arguments of these types, in this order. Return the size of the first one, which the call may copy."""
    if not (least <= len(args) <= len(kinds) and all(map(isinstance, args, kinds))):
        raise UnsafePickleError(f"a call with {', '.join(type(each).__name__ for each in args) or 'nothing'}")
    return len(args[0]) if args and isinstance(args[0], COPIED) else 0


def _any_of(*kinds: type) -> Rule:
    """Return a rule: all arguments are of one of these types. The call may copy long strings and bytes."""

    def rule(*args: Any) -> int:
        _only(args, *[kinds] * len(args))
        return sum(len(each) for each in args if isinstance(each, (str, bytes)) and len(each) > SHORT)

    return rule


def _of_types(*kinds: Any, least: int = 0) -> Rule:
    return lambda *args: _only(args, *kinds, least=least)


def _bytes_of_text(*args: Any) -> int:
    if len(args) == 2 and args[1] not in ("latin1", "latin-1", "utf8", "utf-8"):
        raise UnsafePickleError(f"an encoding, {args[1]!r:.40}")
    return _only(args, str, str, least=2)


def _bytearray(*args: Any) -> int:
    return _bytes_of_text(*args) if len(args) == 2 else _only(args, bytes)


def _factory(*args: Any) -> int:
    return _only(args, (type, type(None)))


def _dtype(*args: Any) -> int:
    _only(args, (str, _numpy().dtype), object, object, least=1)
    _plain_dtype(args[0])
    return 0


def _plain_dtype(given: Any) -> Any:
    dtype = _numpy().dtype(given)
    if dtype.fields is not None or dtype.subdtype is not None:
        raise UnsafePickleError("a numpy.dtype with fields or forged content")
    return dtype


def _without_objects(given: Any) -> Any:
    dtype = _plain_dtype(given)
    if dtype.hasobject:
        raise UnsafePickleError("bytes that would become pointers to objects")
    return dtype


def _reconstruct(*args: Any) -> int:
    _only(args, type, tuple, bytes, least=3)
    if args[0] is not _numpy().ndarray or args[1] != (0,):
        raise UnsafePickleError("an array of another type than numpy.ndarray")
    return 0


def _scalar(*args: Any) -> int:
    _only(args, _numpy().dtype, bytes, least=2)
    if len(args[1]) != _without_objects(args[0]).itemsize:
        raise UnsafePickleError("a number of another size than its type's")
    return len(args[1])


def _frombuffer(*args: Any) -> int:
    _only(args, (bytes, bytearray, memoryview), _numpy().dtype, (tuple, int), str, least=3)
    _check_shape(args[2], _without_objects(args[1]).itemsize, len(args[0]))
    return 0


def _check_shape(shape: Any, item_size: int, size: int) -> None:
    sides = shape if isinstance(shape, tuple) else (shape,)
    if not all(type(side) is int and side >= 0 for side in sides) or math.prod(sides) * item_size != size:
        raise UnsafePickleError("an array whose shape does not match its content")


def _tensor(*args: Any) -> int:
    torch = import_module("torch")
    size, stride, numbers = args[2:3], args[3:4], args[1:2]
    _only(args, torch.storage.TypedStorage, int, tuple, tuple, bool, dict, (dict, type(None)), least=6)
    numbers = (*numbers, *size[0], *stride[0])
    if not all(type(each) is int and each >= 0 for each in numbers) or len(size[0]) != len(stride[0]) or args[5]:
        raise UnsafePickleError("a tensor with a forged shape")
    reach = sum((side - 1) * step for side, step in zip(size[0], stride[0], strict=True)) + args[1] + 1
    if all(size[0]) and reach > args[0]._size():
        raise UnsafePickleError("a tensor that claims more than its storage holds")
    return 0


def _parameter(*args: Any) -> int:
    return _only(args, import_module("torch").Tensor, bool, dict, least=2) * 0


def _storage(*args: Any) -> int:
    _only(args, bytes, least=1)
    _check_storage(args[0])
    return len(args[0])


TEXT, NUMBER = _any_of(str), _any_of(int, type(None))
LIST = (list, tuple)
RULES: dict[str, Rule] = {
    "builtins.bytearray": _bytearray,
    "builtins.complex": _of_types(float, float),
    "builtins.frozenset": _of_types(LIST),
    "builtins.set": _of_types(LIST),
    "builtins.range": NUMBER,
    "builtins.slice": _any_of(int, float, str, type(None)),
    "collections.Counter": _of_types(dict),
    "collections.OrderedDict": _of_types(LIST),
    "collections.defaultdict": _factory,
    "collections.deque": _of_types(LIST, (int, type(None))),
    "decimal.Decimal": TEXT,
    "numpy.dtype": _dtype,
    "torch.Size": _of_types(LIST),
    "torch.device": _any_of(str, int),
}
FUNCTIONS: dict[str, Rule] = {
    "_codecs.encode": _bytes_of_text,  # bytes, in the oldest protocols
    "numpy.core.multiarray._reconstruct": _reconstruct,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy.core.numeric._frombuffer": _frombuffer,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch.storage._load_from_bytes": _storage,
    **{f"pathlib.{name}": TEXT for name in ("Path", "PosixPath", "PurePosixPath", "PureWindowsPath")},
}
DATE = _any_of(int, bytes, str, type(None), datetime.timedelta, datetime.tzinfo)


def _rule_of(kind: type) -> Rule:
    """Return the rule for calls of a class."""
    full = f"{kind.__module__}.{kind.__qualname__}"
    rule = RULES.get(full, DATE if kind.__module__ == "datetime" else None)
    if rule is None:
        raise UnsafePickleError(f"a call of {full}")
    return rule


def _check_keys(keys: Any) -> None:
    """Refuse keys that are slow to hash: a tuple that contains another one twice, which contains another one twice, and
    so on, is short in a file, but hashing it takes exponential time."""
    for key in keys:
        pending, count = [key] if isinstance(key, tuple) else [], 0
        while pending:
            inner = pending.pop()
            count += len(inner)
            if count > LARGEST_KEY:
                raise UnsafePickleError(f"a key of more than {LARGEST_KEY} values")
            pending += [each for each in inner if isinstance(each, tuple)]


def _check_array_state(state: Any) -> int:
    if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[2], _numpy().dtype):
        raise UnsafePickleError("a numpy.ndarray with forged content")
    _, shape, dtype, _, content = state
    if dtype.hasobject:
        _only((content,), list)
        _plain_dtype(dtype)
        _check_shape(shape, 1, len(content))
        return len(content)
    _only((content,), bytes)
    _check_shape(shape, _plain_dtype(dtype).itemsize, len(content))
    return len(content)


def _is_own_state(dtype: Any, state: Any) -> bool:
    """Return whether this is the state that a simple dtype really has, for a dtype object that is not NumPy's shared
    one."""
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


# -- storages of tensors ------------------------------------------------------------------------------

# torch writes pickles of a magic number, a version, the system, the storage's type, size and key, and then the bytes.
# These pickles call nothing.
MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
CALLS = {"REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4", "BYTEARRAY8"}


def _check_storage(data: bytes) -> None:
    stream = io.BytesIO(data)
    if stream.read(len(MAGIC)) != MAGIC:
        raise UnsafePickleError("the storage of a tensor in an unknown format")
    for number in range(4):
        for opcode, argument, _ in pickletools.genops(stream):
            if opcode.name in CALLS or (opcode.name == "GLOBAL" and not NAME_OF_STORAGE.fullmatch(str(argument))):
                raise UnsafePickleError(f"the storage of a tensor with {opcode.name} {argument!r:.60}")
            if number >= 2 and isinstance(argument, int) and argument > len(data):
                raise UnsafePickleError("the storage of a tensor that claims more than the file holds")


# -- the reader -------------------------------------------------------------------------------------

CLASSES = {
    "builtins": {"bytearray", "complex", "frozenset", "range", "set", "slice"},
    "collections": {"Counter", "OrderedDict", "defaultdict", "deque"},
    "datetime": {"date", "datetime", "time", "timedelta", "timezone"},
    "decimal": {"Decimal"},
    "numpy": {"dtype", "ndarray"},
    "torch": {"Size", "device"},
}
# A pickle may name these, as the factory of a defaultdict, but not call them: list(range(10**12)) is a short pickle.
PLAIN_FACTORIES = {"builtins": {"bool", "dict", "float", "int", "list", "str", "tuple"}}
BEGIN = ("PROTO", "FRAME")
# Calls may copy as much as the file is long, and some more: each part of a real file is copied once.
COPIES, FREE = 2, 64 << 10
MOVES = {
    "numpy._core.": "numpy.core.",
    "pathlib._local": "pathlib",
}  # newer names, and the older ones for the same modules
MOVED = re.compile("|".join(f"^{re.escape(each)}" for each in MOVES))


def _newer(module: str) -> str:
    """Return the new name of a NumPy module: the old name works too, but warns."""
    numpy_2 = module.startswith("numpy.core.") and int(_numpy().__version__.partition(".")[0]) >= 2
    return module.replace("numpy.core.", "numpy._core.") if numpy_2 else module


class _Function:
    """Represents a function that a pickle names. It can be called as its rule allows, and cannot be changed."""

    __slots__ = ("called", "function", "name", "rule")

    def __init__(self, name: str, function: Any, rule: Rule) -> None:
        self.name, self.function, self.rule, self.called = name, function, rule, False


def is_dictionary(data: bytes | memoryview) -> bool:
    """Return whether this pickle begins by making a dictionary. Executes nothing."""
    try:
        first = next(op.name for op, _, _ in pickletools.genops(bytes(data[:64])) if op.name not in BEGIN)
    except (ValueError, StopIteration):
        return False
    return first in ("EMPTY_DICT", "MARK")


def read(data: bytes | memoryview) -> Any:
    """Return the content. Raise `UnsafePickleError` for content that needs trust, and the errors of pickle for
    damage."""
    return _Reader(data).load()


_Python: Any = pickle._Unpickler  # the implementation in C cannot be overridden


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
                raise UnsafePickleError(f"{function.name} itself")
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
        raise UnsafePickleError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        raise UnsafePickleError(f"a persistent id, {pid!r:.40}")

    def _spend(self, cost: int) -> None:
        self._left -= cost
        if self._left < 0:
            raise UnsafePickleError("copies of its parts that take much more memory than the file")

    def load_reduce(self) -> None:
        args = self.stack.pop()
        function = self.stack[-1]
        if not isinstance(args, tuple):
            raise UnsafePickleError("a call without arguments")
        if isinstance(function, _Function):
            self._spend(function.rule(*args))
            function.called, function = True, function.function
        elif isinstance(function, type):
            self._spend(_rule_of(function)(*args))
            _check_keys(args[0] if args and function in (set, frozenset) else ())
        else:
            raise UnsafePickleError(f"a call of a {type(function).__name__}")
        self.stack[-1] = function(*args)

    def load_build(self) -> None:
        """Check the state first. A forged dtype would make NumPy take bytes for addresses of objects."""
        built, state = self.stack[-2:]
        kind = type(built)
        if kind is collections.OrderedDict and type(state) is dict:
            pass  # attributes, as torch's state dictionaries have
        elif kind.__module__.partition(".")[0] == "numpy" and isinstance(built, _numpy().dtype):
            if not _is_own_state(built, state):
                raise UnsafePickleError("a numpy.dtype with fields or forged content")
        elif kind.__module__ == "numpy" and kind is _numpy().ndarray:
            self._spend(_check_array_state(state))
        else:
            raise UnsafePickleError(f"a state for a {kind.__name__}")
        _Python.load_build(self)

    def _refuse_making(self, how: str) -> None:
        raise UnsafePickleError(f"an object that is not a plain value ({how})")

    def load_bytearray8(self) -> None:
        """Check the length: pickle allocates as many bytes as the file claims."""
        (size,) = struct.unpack("<Q", self.read(8))
        content = self.read(min(size, self._size))
        if len(content) != size:
            raise pickle.UnpicklingError(f"the file ends in the middle of {size} bytes")
        self.append(bytearray(content))

    def load_frame(self) -> None:
        (size,) = struct.unpack("<Q", self.read(8))
        if size > self._size:
            raise pickle.UnpicklingError(f"the file ends in the middle of {size} bytes")
        self._unframer.load_frame(size)

    def _adding(self, target: Any, kinds: tuple[type, ...], keys: Any) -> None:
        if type(target) not in kinds:
            raise UnsafePickleError(f"values for a {type(target).__name__}")
        _check_keys(keys)


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
# The container of values behind a mark is the last object before the mark.
_guarded(pickle.APPEND, lambda it: it._adding(it.stack[-2], LISTS, ()))
_guarded(pickle.APPENDS, lambda it: it._adding(it.metastack[-1][-1], LISTS, ()))
_guarded(pickle.SETITEM, lambda it: it._adding(it.stack[-3], DICTS, it.stack[-2:-1]))
_guarded(pickle.SETITEMS, lambda it: it._adding(it.metastack[-1][-1], DICTS, it.stack[::2]))
_guarded(pickle.ADDITEMS, lambda it: it._adding(it.metastack[-1][-1], (set,), it.stack))
_guarded(pickle.DICT, lambda it: _check_keys(it.stack[::2]))
_guarded(pickle.FROZENSET, lambda it: _check_keys(it.stack))


def _storage_of(data: bytes) -> Any:
    """Load a storage. torch's own function would run code from the bytes."""
    import torch

    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
