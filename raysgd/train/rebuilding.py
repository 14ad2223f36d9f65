"""What the pickle of a stored dictionary may call, and with what: nothing else is called, and nothing is made that is much
larger than the file. Each rule raises `Refused`, or returns how much the call copies."""

from __future__ import annotations

import datetime
import io
import math
import pickle
import pickletools
import re
from collections.abc import Callable
from importlib import import_module
from typing import Any

__all__ = ["FUNCTIONS", "Refused", "check_array_state", "check_keys", "is_own_state", "numpy", "rule_of"]

SHORT = 4096
LARGEST_KEY = 1000  # values in nested tuples; their hash takes time for each, also where one is used many times
NAME_OF_STORAGE = re.compile(r"torch(\.\w+)* \w*Storage")


class Refused(pickle.UnpicklingError):
    """The pickle wants something that could be code, or more memory than a real one."""


COPIED = (bytes, bytearray, str, list, tuple, dict)
Rule = Callable[..., int]


def numpy() -> Any:
    """numpy, which need not be there."""
    return import_module("numpy")


def _only(args: tuple[Any, ...], *kinds: Any, least: int = 0) -> int:
    """The arguments are of these types, in this order; the first may be copied."""
    right = least <= len(args) <= len(kinds) and all(map(isinstance, args, kinds))
    if not right:
        raise Refused(f"a call with {', '.join(type(each).__name__ for each in args) or 'nothing'}")
    return len(args[0]) if args and isinstance(args[0], COPIED) else 0


def _any_of(*kinds: type) -> Rule:
    """All arguments are of one of these types; a long text or long bytes may be copied."""

    def rule(*args: Any) -> int:
        _only(args, *[kinds] * len(args))
        return sum(len(each) for each in args if isinstance(each, (str, bytes)) and len(each) > SHORT)

    return rule


def _of_types(*kinds: Any, least: int = 0) -> Rule:
    return lambda *args: _only(args, *kinds, least=least)


def _bytes_of_text(*args: Any) -> int:
    if len(args) == 2 and args[1] not in ("latin1", "latin-1", "utf8", "utf-8"):
        raise Refused(f"an encoding, {args[1]!r:.40}")
    return _only(args, str, str, least=2)


def _bytearray(*args: Any) -> int:
    return _bytes_of_text(*args) if len(args) == 2 else _only(args, bytes)


def _factory(*args: Any) -> int:
    return _only(args, (type, type(None)))


def _dtype(*args: Any) -> int:
    _only(args, (str, numpy().dtype), object, object, least=1)
    _plain_dtype(args[0])
    return 0


def _plain_dtype(given: Any) -> Any:
    dtype = numpy().dtype(given)
    if dtype.fields is not None or dtype.subdtype is not None:
        raise Refused("a numpy.dtype with fields, or put together by hand")
    return dtype


def _without_objects(given: Any) -> Any:
    dtype = _plain_dtype(given)
    if dtype.hasobject:
        raise Refused("bytes that are to be taken for objects")
    return dtype


def _reconstruct(*args: Any) -> int:
    _only(args, type, tuple, bytes, least=3)
    if args[0] is not numpy().ndarray or args[1] != (0,):
        raise Refused("an array of another type than numpy.ndarray")
    return 0


def _scalar(*args: Any) -> int:
    _only(args, numpy().dtype, bytes, least=2)
    if len(args[1]) != _without_objects(args[0]).itemsize:
        raise Refused("a number of another size than its type's")
    return len(args[1])


def _frombuffer(*args: Any) -> int:
    _only(args, (bytes, bytearray, memoryview), numpy().dtype, (tuple, int), str, least=3)
    _fits(_without_objects(args[1]), args[2], len(args[0]))
    return 0


def _fits(dtype: Any, shape: Any, size: int) -> None:
    sides = shape if isinstance(shape, tuple) else (shape,)
    if not all(type(side) is int and side >= 0 for side in sides) or math.prod(sides) * dtype.itemsize != size:
        raise Refused(f"an array that claims another size than its {size} bytes have")


def _tensor(*args: Any) -> int:
    torch = import_module("torch")
    size, stride, numbers = args[2:3], args[3:4], args[1:2]
    _only(args, torch.storage.TypedStorage, int, tuple, tuple, bool, dict, (dict, type(None)), least=6)
    numbers = (*numbers, *size[0], *stride[0])
    if not all(type(each) is int and each >= 0 for each in numbers) or len(size[0]) != len(stride[0]) or args[5]:
        raise Refused("a tensor that was put together by hand")
    reach = sum((side - 1) * step for side, step in zip(size[0], stride[0], strict=True)) + args[1] + 1
    if all(size[0]) and reach > args[0]._size():
        raise Refused("a tensor that claims more than its storage holds")
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


def rule_of(kind: type) -> Rule:
    """Return the rule for calls of a class."""
    full = f"{kind.__module__}.{kind.__qualname__}"
    rule = RULES.get(full, DATE if kind.__module__ == "datetime" else None)
    if rule is None:
        raise Refused(f"a call of {full}")
    return rule


def check_keys(keys: Any) -> None:
    """A tuple that holds another one twice, which holds another one twice, ..., is short in a file, and its hash takes for
    ever."""
    for key in keys:
        pending, count = [key] if isinstance(key, tuple) else [], 0
        while pending:
            inner = pending.pop()
            count += len(inner)
            if count > LARGEST_KEY:
                raise Refused(f"a key of more than {LARGEST_KEY} values")
            pending += [each for each in inner if isinstance(each, tuple)]


def check_array_state(state: Any) -> int:
    if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[2], numpy().dtype):
        raise Refused("a numpy.ndarray that was put together by hand")
    _, shape, dtype, _, content = state
    if dtype.hasobject:
        _only((content,), list)
        _plain_dtype(dtype)
        sides = shape if isinstance(shape, tuple) else (shape,)
        if not all(type(side) is int and side >= 0 for side in sides) or math.prod(sides) != len(content):
            raise Refused(f"an array that claims another size than its {len(content)} objects")
        return len(content)
    _only((content,), bytes)
    _fits(_plain_dtype(dtype), shape, len(content))
    return len(content)


def is_own_state(dtype: Any, state: Any) -> bool:
    """Does this say of a simple type what it says itself? And is it this file's own, not the one that everybody shares?"""
    if not isinstance(state, tuple) or len(state) not in (8, 9) or dtype is numpy().dtype(dtype.char):
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

# As torch writes them: pickles of a magic number, a version, the system, the storage's type and size, and its key; then
# its bytes. A pickle of these calls nothing.
MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
CALLS = {"REDUCE", "BUILD", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4", "BYTEARRAY8"}


def _check_storage(data: bytes) -> None:
    stream = io.BytesIO(data)
    if stream.read(len(MAGIC)) != MAGIC:
        raise Refused("the storage of a tensor in a form that is not known here")
    for number in range(4):
        for opcode, argument, _ in pickletools.genops(stream):
            if opcode.name in CALLS or (opcode.name == "GLOBAL" and not NAME_OF_STORAGE.fullmatch(str(argument))):
                raise Refused(f"the storage of a tensor with {opcode.name} {argument!r:.60}")
            if number >= 2 and isinstance(argument, int) and argument > len(data):
                raise Refused("the storage of a tensor that claims more than the file holds")
