"""Scan a pickle without executing it, and refuse one that needs more memory or time than its file's size explains. Both.

`torch.load(weights_only=True)` runs no code from a file, but it creates whatever the file claims: a storage larger than
the file, a `torch.FloatTensor(10**12)`, a set of the elements of an expanded tensor. `scan` follows the pickle's
operations with placeholders for their results. It accepts only those that create plain values, and tensors within the data
of the file.
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
    """The pickle contains more than plain values and tensors. Only its author knows whether it is safe."""


class Global(NamedTuple):
    name: str


class Storage(NamedTuple):
    elements: int
    bytes_each: int


class Marker(NamedTuple):
    name: str


class Items(NamedTuple):
    """A tuple: its items, how deeply they are nested, and how many values it has if shared ones are counted each time."""

    values: tuple[Any, ...]
    depth: int
    size: int


MARK = Marker("mark")
PLAIN = Marker("a plain value")
BYTES = Marker("bytes")
TENSOR = Marker("a tensor")

# Bytes per element, by the name of torch's storage class.
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
# Functions whose arguments and results are a few plain values.
SMALL = {"builtins.complex", "torch.device", "torch.serialization._get_layout"}
TYPES = {"torch.Tensor", "torch.nn.parameter.Parameter"}

Claim = Callable[[str, int], None]


def scan(file: BinaryIO, claim: Claim) -> None:
    """Scan the pickle that begins here, to its end. `claim` gets the key and the bytes of each storage that it refers to,
    and raises CheckpointError if the file has no such storage. Raise CheckpointError for an invalid pickle, and
    ForeignObjectError for objects that only a trusted file may contain."""
    scanner = Scanner(claim)
    try:
        for operation, argument, _ in pickletools.genops(file):
            scanner.follow(operation.name, argument)
    except CheckpointError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise damaged(f"its index is not a complete pickle ({type(error).__name__})") from error


class Scanner:
    """Owns the stack and the memo of one pickle. Everything but numbers, text, tuples, names and storages is a `Marker`."""

    def __init__(self, claim: Claim) -> None:
        self._claim = claim
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._types: dict[str, str] = {}
        self._allowed = allowed_by_user()

    def follow(self, name: str, argument: Any) -> None:
        """Carry out one operation on the stack."""
        stack = self._stack
        match name:
            case "PROTO" | "STOP":
                pass
            case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINUNICODE":
                stack.append(argument)
            case _ if name in CREATED:
                stack.append(CREATED[name])
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(items([stack.pop() for _ in range(int(name[-1]))][::-1]))
            case "TUPLE":
                stack.append(items(self._to_mark()))
            case "APPEND":
                stack.pop()
            case "SETITEM":
                stack.pop()
                stack.pop()
            case "APPENDS" | "SETITEMS":
                self._to_mark()
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "GLOBAL":
                module, _, attribute = argument.partition(" ")
                stack.append(Global(f"{'builtins' if module == '__builtin__' else module}.{attribute}"))
            case "NEWOBJ" | "REDUCE":
                arguments, function = stack.pop(), stack.pop()
                stack.append(self._called(function, arguments))
            case "BINPERSID":
                stack.append(self._storage(stack.pop()))
            case "BUILD":
                stack.pop()
                if stack[-1] is TENSOR:
                    raise ForeignObjectError("it changes a tensor after creating it")
            case _:
                raise ForeignObjectError(f"it uses the pickle operation {name}")

    def _called(self, function: Any, arguments: Any) -> Any:
        """Return the placeholder for a call's result, if the call is allowed."""
        if not isinstance(function, Global) or not isinstance(arguments, Items):
            raise damaged("its index calls something that is not a function")
        name, given = function.name, arguments.values
        if name in REBUILDERS:
            check_bounds(name, given)
            return TENSOR
        if name in OF_TENSORS or name == "torch.nn.parameter.Parameter":
            if given and given[0] is TENSOR:
                return TENSOR
        elif name == "torch._utils._rebuild_sparse_tensor":
            return TENSOR
        elif name == "torch._tensor._rebuild_from_type_v2":
            inner_function, kind, inner = given[:3]
            if isinstance(kind, Global) and kind.name in TYPES:
                return self._called(inner_function, inner)
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
        elif name in self._allowed:
            return PLAIN
        raise ForeignObjectError(f"it calls {name}")

    def _storage(self, claimed: Any) -> Storage:
        """Return the storage of a persistent ID: ("storage", type, key, location, elements)."""
        values = claimed.values if isinstance(claimed, Items) else ()
        if len(values) not in (5, 6) or values[0] != "storage" or values[5:] not in ((), (PLAIN,)):
            raise damaged("its index refers to something that is not a storage")
        _, kind, key, _, elements = values[:5]
        if not isinstance(kind, Global) or not isinstance(key, str) or type(elements) is not int or elements < 0:
            raise damaged("its index describes an impossible storage")
        each = element_size(kind.name)
        if self._types.setdefault(key, kind.name) != kind.name:
            raise damaged(f"its index gives storage {key[:20]!r} two types")
        self._claim(key, elements * each)
        return Storage(elements, each)

    def _to_mark(self) -> list[Any]:
        """Remove and return what was put on the stack since the last mark."""
        stack = self._stack
        place = len(stack) - 1
        while stack[place] is not MARK:
            place -= 1
            if place < 0:
                raise damaged("its index is not a pickle")
        values = stack[place + 1 :]
        del stack[place:]
        return values


# The placeholders for the values that these operations put on the stack.
CREATED = {
    **dict.fromkeys(("NONE", "NEWTRUE", "NEWFALSE", "EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET", "BINFLOAT"), PLAIN),
    "MARK": MARK,
    "EMPTY_TUPLE": Items((), 1, 1),
    "SHORT_BINSTRING": BYTES,
}


def items(values: list[Any]) -> Items:
    """Return the tuple of these values, if it is small: Python visits each of them for a hash, also shared ones."""
    inner = [each for each in values if isinstance(each, Items)]
    depth = 1 + max((each.depth for each in inner), default=0)
    size = 1 + len(values) + sum(each.size for each in inner)
    if depth > DEEPEST:
        raise damaged(f"its tuples are nested more than {DEEPEST} levels deep")
    if size > LARGEST_TUPLE:
        raise ForeignObjectError(f"it contains a tuple of more than {LARGEST_TUPLE} values")
    return Items(tuple(values), depth, size)


def check_bounds(name: str, given: tuple[Any, ...]) -> None:
    """Raise CheckpointError unless a tensor is within its storage."""
    storage, offset, size, stride = given[:4]
    fits = isinstance(storage, Storage) and type(offset) is int and offset >= 0
    fits = fits and isinstance(size, Items) and isinstance(stride, Items) and len(size.values) == len(stride.values)
    if not fits or not all(type(each) is int and each >= 0 for each in [*size.values, *stride.values]):
        raise damaged("its index describes an impossible tensor")
    bytes_each = element_size(given[6].name) if name.endswith("_v3") else storage.bytes_each
    last = offset + sum((length - 1) * step for length, step in zip(size.values, stride.values, strict=True))
    available = storage.elements * storage.bytes_each
    if 0 not in size.values and (last + 1) * bytes_each > available:
        raise damaged(f"a tensor claims {(last + 1) * bytes_each} bytes of a storage that has {available}")


def element_size(name: str) -> int:
    """Return the bytes of an element, by the name of a storage class or of a dtype."""
    short = name.removeprefix("torch.storage.").removeprefix("torch.")
    if short.removesuffix("Storage") in STORAGES and short.endswith("Storage"):
        return STORAGES[short.removesuffix("Storage")]
    known = getattr(torch, short, None) if short.isidentifier() else None
    if not isinstance(known, torch.dtype):
        raise damaged(f"its index has a storage of the unknown type {name[:60]!r}")
    return known.itemsize


def allowed_by_user() -> set[str]:
    """Return the names that the user has added to torch's safe globals."""
    listed: list[Any] = torch.serialization.get_safe_globals()
    return {each[1] if isinstance(each, tuple) else f"{each.__module__}.{each.__qualname__}" for each in listed}


def looks_like_ours(index: bytes) -> bool:
    """Return whether this pickle seems to be a dictionary with models and optimizers."""
    try:
        steps = [(step.name, argument) for step, argument, _ in pickletools.genops(index)]
    except ValueError:
        return False
    named = {argument for _, argument in steps if isinstance(argument, str)}
    return ("EMPTY_DICT", None) in steps[:2] and {"models", "optimizers"} <= named


def damaged(why: str) -> CheckpointError:
    return CheckpointError(f"not a complete checkpoint: {why}")
