"""Reads a pickle without executing it, and refuses what would need more memory or time than the file's size explains.

`torch.load(weights_only=True)` runs no code from a file, but it makes what the file claims: a storage of a size that is
not in the file, a `torch.FloatTensor(10**12)`, a set of the elements of an expanded tensor. `scan` follows the pickle's
operations with stand-ins for their results, and lets only those through that make plain values and tensors within the
data that the file has.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple

import torch

from raysgd.errors import CheckpointError

__all__ = ["Claim", "ForeignObjectError", "damaged", "looks_like_ours", "scan"]

DEEPEST = 100
LARGEST_TUPLE = 10_000


class ForeignObjectError(CheckpointError):
    """The pickle holds more than plain values and tensors: only whoever made it can say whether it is safe."""


class Global(NamedTuple):
    name: str


class Storage(NamedTuple):
    elements: int
    bytes_each: int


class Marker(NamedTuple):
    name: str


class Items(NamedTuple):
    """A tuple: its items, how deep it is, and how many values it has when all that it shares is written out."""

    values: tuple[Any, ...]
    depth: int
    size: int


MARK = Marker("mark")
PLAIN = Marker("a plain value")
BYTES = Marker("bytes")
TENSOR = Marker("a tensor")

# The bytes of an element, by the class that torch names for a storage.
STORAGES = {
    **dict.fromkeys(("Untyped", "Byte", "Char", "Bool", "QUInt8", "QInt8", "QUInt4x2", "QUInt2x4"), 1),
    **dict.fromkeys(("Short", "Half", "BFloat16"), 2),
    **dict.fromkeys(("Int", "Float", "QInt32"), 4),
    **dict.fromkeys(("Long", "Double", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}
REBUILDERS = {f"torch._utils._rebuild_{kind}" for kind in ("tensor", "tensor_v2", "tensor_v3", "qtensor")}
OF_TENSORS = {f"torch._utils._rebuild_{kind}" for kind in ("parameter", "parameter_with_state")}
CONTAINERS = {"collections.OrderedDict", "collections.Counter", "builtins.set", "torch.Size"}
# Their arguments are a few plain values, and so is what they make.
SMALL = {"builtins.complex", "torch.device", "torch.serialization._get_layout"}
TYPES = {"torch.Tensor", "torch.nn.parameter.Parameter"}

Claim = Callable[[str, int], None]


def scan(file: BinaryIO, claim: Claim) -> None:
    """Follow the pickle that begins here to its end. `claim` gets the key and the bytes of each storage that it refers
    to, and raises CheckpointError when the file has no such storage. Raises CheckpointError for what cannot be, and
    ForeignObjectError for objects that need trust."""
    scanner = Scanner(claim)
    try:
        for operation, argument, _ in pickletools.genops(file):
            scanner.follow(operation.name, argument)
    except CheckpointError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise damaged(f"its index ends early or is no pickle ({type(error).__name__})") from error


class Scanner:
    """Owns the stack and the memo of one pickle. What is no number, text, tuple, name or storage is a `Marker`."""

    def __init__(self, claim: Claim) -> None:
        self._claim = claim
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._keys: dict[str, str] = {}
        self._safe = user_allowed()

    def follow(self, name: str, argument: Any) -> None:
        """Do what one operation does."""
        stack = self._stack
        if name in PUSHED:
            stack.append(argument)
        elif name in MADE:
            stack.append(MADE[name])
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name in TUPLES:
            values = [stack.pop() for _ in range(TUPLES[name])]
            stack.append(items(values[::-1]))
        elif name not in ("PROTO", "STOP"):
            handler = HANDLERS.get(name)
            if handler is None:
                raise ForeignObjectError(f"it uses the pickle operation {name}")
            handler(self, argument)

    def _tuple(self, _: Any) -> None:
        self._stack.append(items(self._to_mark()))

    def _append(self, _: Any) -> None:
        self._stack.pop()

    def _appends(self, _: Any) -> None:
        self._to_mark()

    def _set_item(self, _: Any) -> None:
        self._stack.pop()
        self._stack.pop()

    def _build(self, _: Any) -> None:
        self._stack.pop()
        if self._stack[-1] is TENSOR:
            raise ForeignObjectError("it changes a tensor after making it")

    def _global(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        module = "builtins" if module == "__builtin__" else module
        self._stack.append(Global(f"{module}.{name}"))

    def _new(self, _: Any) -> None:
        arguments, made = self._stack.pop(), self._stack.pop()
        self._stack.append(self._called(made, arguments))

    def _reduce(self, argument: Any) -> None:
        arguments, made = self._stack.pop(), self._stack.pop()
        self._stack.append(self._called(made, arguments))

    def _called(self, made: Any, arguments: Any) -> Any:
        """Return what stands for the result, if this call may be made."""
        if not isinstance(made, Global) or not isinstance(arguments, Items):
            raise damaged("its index calls what is no function")
        name, given = made.name, arguments.values
        if name in REBUILDERS:
            check_bounds(name, given)
            return TENSOR
        if name in OF_TENSORS or name == "torch.nn.parameter.Parameter":
            if given and given[0] is TENSOR:
                return TENSOR
        elif name == "torch._utils._rebuild_sparse_tensor":
            return TENSOR
        elif name == "torch._tensor._rebuild_from_type_v2":
            function, kind, inner = given[:3]
            if isinstance(kind, Global) and kind.name in TYPES:
                return self._called(function, inner)
        elif name in CONTAINERS:
            if all(isinstance(each, Items) or each is PLAIN for each in given):
                return PLAIN
        elif name in SMALL:
            if all(isinstance(each, (int, float, str)) or each is PLAIN for each in given):
                return PLAIN
        elif name == "_codecs.encode":
            if len(given) == 2 and isinstance(given[0], str) and given[1] in ("latin1", "latin-1"):
                return BYTES
        elif name == "builtins.bytearray":
            if not given or isinstance(given[0], str) or given[0] is BYTES:
                return PLAIN
        elif name in self._safe:
            return PLAIN
        raise ForeignObjectError(f"it calls {name}")

    def _storage(self, _: Any) -> None:
        """A persistent id: ("storage", type, key, location, elements)."""
        claimed = self._stack.pop()
        values = claimed.values if isinstance(claimed, Items) else ()
        if len(values) not in (5, 6) or values[0] != "storage" or values[5:] not in ((), (PLAIN,)):
            raise damaged("its index refers to something else than a storage")
        _, kind, key, _, elements = values[:5]
        if not isinstance(kind, Global) or not isinstance(key, str) or type(elements) is not int or elements < 0:
            raise damaged("its index describes a storage that cannot be")
        each = element_size(kind.name)
        if self._keys.setdefault(key, kind.name) != kind.name:
            raise damaged(f"its index gives storage {key[:20]!r} two types")
        self._claim(key, elements * each)
        self._stack.append(Storage(elements, each))

    def _to_mark(self) -> list[Any]:
        """Return what was put on the stack since the last mark."""
        stack = self._stack
        place = len(stack) - 1
        while stack[place] is not MARK:
            place -= 1
            if place < 0:
                raise damaged("its index is no pickle")
        values = stack[place + 1 :]
        del stack[place:]
        return values


PUSHED = {"BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE"}
MADE = {
    "MARK": MARK,
    "NONE": PLAIN,
    "NEWTRUE": PLAIN,
    "NEWFALSE": PLAIN,
    "EMPTY_LIST": PLAIN,
    "EMPTY_DICT": PLAIN,
    "EMPTY_SET": PLAIN,
    "EMPTY_TUPLE": Items((), 1, 1),
    "BINFLOAT": PLAIN,
    "SHORT_BINSTRING": BYTES,
}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
HANDLERS: dict[str, Callable[[Scanner, Any], None]] = {
    "TUPLE": Scanner._tuple,
    "APPEND": Scanner._append,
    "APPENDS": Scanner._appends,
    "SETITEM": Scanner._set_item,
    "SETITEMS": Scanner._appends,
    "BUILD": Scanner._build,
    "GLOBAL": Scanner._global,
    "NEWOBJ": Scanner._new,
    "REDUCE": Scanner._reduce,
    "BINPERSID": Scanner._storage,
}


def items(values: list[Any]) -> Items:
    """Return the tuple of these values. Python walks through all of it for a hash, however much of it is shared."""
    inner = [each for each in values if isinstance(each, Items)]
    depth = 1 + max((each.depth for each in inner), default=0)
    size = 1 + len(values) + sum(each.size for each in inner)
    if depth > DEEPEST:
        raise damaged(f"it has tuples in more than {DEEPEST} levels")
    if size > LARGEST_TUPLE:
        raise ForeignObjectError(f"it has a tuple of more than {LARGEST_TUPLE} values")
    return Items(tuple(values), depth, size)


def check_bounds(name: str, given: tuple[Any, ...]) -> None:
    """Raise CheckpointError unless a tensor lies within its storage."""
    storage, offset, size, stride = given[:4]
    fits = isinstance(storage, Storage) and type(offset) is int and offset >= 0
    fits = fits and isinstance(size, Items) and isinstance(stride, Items) and len(size.values) == len(stride.values)
    if not fits or not all(type(each) is int and each >= 0 for each in [*size.values, *stride.values]):
        raise damaged("its index describes a tensor that cannot be")
    bytes_each = element_size(given[6].name) if name.endswith("_v3") else storage.bytes_each
    last = offset + sum((length - 1) * step for length, step in zip(size.values, stride.values, strict=True))
    there = storage.elements * storage.bytes_each
    if 0 not in size.values and (last + 1) * bytes_each > there:
        raise damaged(f"a tensor claims {(last + 1) * bytes_each} bytes of a storage that has {there}")


def element_size(name: str) -> int:
    """Return the bytes of an element, by the name of a storage's class or of a dtype."""
    short = name.removeprefix("torch.storage.").removeprefix("torch.")
    if short.removesuffix("Storage") in STORAGES and short.endswith("Storage"):
        return STORAGES[short.removesuffix("Storage")]
    known = getattr(torch, short, None) if short.isidentifier() else None
    if not isinstance(known, torch.dtype):
        raise damaged(f"its index has a storage of the unknown type {name[:60]!r}")
    return known.itemsize


def user_allowed() -> set[str]:
    """Return the names of what the user has told torch to be safe."""
    listed: list[Any] = torch.serialization.get_safe_globals()
    return {each[1] if isinstance(each, tuple) else f"{each.__module__}.{each.__qualname__}" for each in listed}


def looks_like_ours(index: bytes) -> bool:
    """Return whether this pickle is a dictionary that names models and optimizers, as far as one can tell without
    loading it."""
    try:
        steps = [(step.name, argument) for step, argument, _ in pickletools.genops(index)]
    except ValueError:
        return False
    named = {argument for _, argument in steps if isinstance(argument, str)}
    return ("EMPTY_DICT", None) in steps[:2] and {"models", "optimizers"} <= named


def damaged(why: str) -> CheckpointError:
    return CheckpointError(f"this is no whole checkpoint: {why}")
