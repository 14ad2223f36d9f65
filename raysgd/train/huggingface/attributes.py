"""What has changed in the attributes of objects that a function creates in each attempt. Worker."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import io
import random
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch
from torch.utils.data import Sampler
from transformers import Trainer
from transformers.trainer_callback import ExportableState

from raysgd.errors import ConfigError
from raysgd.train.elastic_state import copied
from raysgd.train.huggingface.foreign import SET_BY_TRANSFORMERS

LIBRARIES = {"transformers", "torch", "accelerate", "builtins"}
DATA = (
    *(type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, deque, Iterator, Sampler),
    *(torch.Tensor, torch.Generator, numpy.ndarray, numpy.generic, numpy.random.Generator, random.Random),
)
OF_ATTRIBUTES: Any = object.__reduce__  # of objects that hold attributes only, unlike methods and partial functions
NOT_COPIED = (
    "raysgd cannot copy the attribute %s of %s, a %s, and it would begin again after a worker failure. Keep the place in it as a number, "
    "or derive the class from transformers' ExportableState, whose `state` says what to keep"
)


@dataclasses.dataclass(frozen=True)
class Reference:
    """Stands in a commit for an object that the function creates."""

    name: str

    def __deepcopy__(self, memo: Any) -> Any:
        return memo.get("live", {}).get(self.name, self)


class Attributes:
    """Finds what has changed in the attributes of some objects, the owners, which the function
    creates again in each attempt, and puts it back.

    Copied are data, and objects from the owner's package. Of modules, and of other objects with
    `state_dict`, the state is kept. References to those that are `live` stay references. What
    cannot be copied from the beginning, as a file or a progress bar, stays as it is, also in a
    container; an iterator is refused.
    """

    def __init__(self, owners: Mapping[str, Any], live: Mapping[str, Any]) -> None:
        self._owners, self._live = owners, {**live, **owners}
        self._references = {id(each): Reference(name) for name, each in self._live.items()}
        self._first: dict[str, dict[str, Any]] = {name: {} for name in owners}
        self._marks: dict[str, dict[str, Any]] = {name: {} for name in owners}
        self._bound = {name: dict(vars(owner)) for name, owner in owners.items()}
        self._first = self.changed()
        self._marks = {
            name: {attribute: marks_of(self._bound[name].get(attribute)) for attribute in first}
            for name, first in self._first.items()
        }

    def changed(self) -> dict[str, dict[str, Any]]:
        memo = dict[Any, Any](self._references)
        return {name: dict(self._changes(name, memo)) for name in self._owners}

    def _changes(self, name: str, memo: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
        owner, first, bound = self._owners[name], self._first[name], self._bound[name]
        exports = isinstance(owner, ExportableState)
        for attribute, value in {**vars(owner), **(owner.state()["attributes"] if exports else {})}.items():
            if name == "trainer" and attribute in SET_BY_TRANSFORMERS:
                continue
            before, same = first.get(attribute, first), value is bound.get(attribute, bound)
            has_state = isinstance(value, torch.nn.Module)
            data = not has_state and is_data(value, owner)
            has_state |= hasattr(value, "load_state_dict") and not data
            if value is before or (same and (id(value) in self._references or not (data or has_state))):
                continue
            marks = self._marks[name].get(attribute)
            if is_equal(value, before) if marks is None else marks_of(value) == marks:
                continue
            try:
                change = Saved(copied(value.state_dict())) if same and has_state else copy.deepcopy(value, memo)
            except Exception as error:
                if data and not exports and (attribute in first or isinstance(value, Iterator)):
                    raise ConfigError(NOT_COPIED % (attribute, type(owner).__name__, type(value).__name__)) from error
                continue
            if not is_equal(change, before):
                yield attribute, change

    def put_back(self, changed: Mapping[str, Mapping[str, Any]]) -> None:
        memo: dict[Any, Any] = {"live": self._live}
        for name, owner in self._owners.items():
            changes = changed.get(name, {})
            for attribute, value in {**self._first[name], **changes}.items():
                now = vars(owner).get(attribute)
                if attribute in changes or is_data(now, owner):
                    new_value = copy.deepcopy(value, memo)
                    # There is one of each live object, and of what has no copy, such as a member of an Enum.
                    is_one = new_value is value or isinstance(value, Reference)
                    vars(owner)[attribute] = new_value if is_one else renewed(now, new_value)


@dataclasses.dataclass
class Saved:
    """The state of an object that the function creates, and that loads it."""

    state: Any


def renewed(now: Any, target: Any) -> Any:
    """What an attribute that is `now` this becomes: the same object with other content, if it can,
    because the function may have it, too."""
    if isinstance(target, Saved):
        now.load_state_dict(target.state)
    elif now is target or type(now) is not type(target):
        return target
    elif isinstance(now, (list, deque)):
        now.clear()
        now.extend(target)
    elif isinstance(now, (dict, set)):
        now.clear()
        now.update(target)
    elif hasattr(now, "__dict__") and not isinstance(now, DATA) and type(now).__reduce__ is OF_ATTRIBUTES:
        vars(now).clear()
        vars(now).update(vars(target))
    else:
        return target
    return now


def is_data(value: Any, owner: Any) -> bool:
    """Whether a value is data, or of a class from the same package as its owner's, which is no
    library that raysgd knows."""
    first = next(kind for kind in type(owner).__mro__ if not kind.__module__.startswith("raysgd."))
    package = first.__module__.partition(".")[0]
    is_own = package not in LIBRARIES and package == type(value).__module__.partition(".")[0]
    return is_own or (isinstance(value, DATA) and not isinstance(value, io.IOBase))


def marks_of(value: Any) -> list[Any] | None:
    """What changes whenever this module, tensor, or list or dictionary of tensors changes.
    `tensor.data` can change without a new version, so the sum of the bits is in it, too."""
    if isinstance(value, torch.nn.Module):
        tensors: dict[Any, Any] = value.state_dict(keep_vars=True)
    elif isinstance(value, dict):
        tensors = value
    else:
        tensors = dict(enumerate(value if isinstance(value, (list, tuple)) else [value]))
    if not all(type(each) in (torch.Tensor, torch.nn.Parameter) for each in tensors.values()):
        return None
    return [type(value), *((name, *mark_of(each)) for name, each in tensors.items())]


def mark_of(tensor: Any) -> tuple[Any, ...]:
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_complex():
        return (float("nan"),)  # not equal to itself: it is copied
    bits = tensor.detach().contiguous().flatten()
    aligned = (bits.nbytes | bits.storage_offset() * bits.itemsize) % 8 == 0
    total = bits.view(torch.int64 if aligned else torch.uint8).sum(dtype=torch.int64).item()
    return tensor._version, tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, total


def is_equal(one: Any, other: Any) -> bool:
    """Whether two values are known to be equal. For tensors and arrays, they are not."""
    try:
        return bool(one == other)
    except Exception:
        return False


def attributes_of(trainer: Any, *, without: Any) -> Attributes:
    """The attributes of the callbacks `without` one, the arguments, and the Trainer's class, but
    not those that transformers sets."""
    owners, handler = {"trainer": trainer, "args": trainer.args}, trainer.callback_handler
    for each in handler.callbacks:
        if each is not without:
            kinds = [name for name in owners if name.startswith(f"{type(each).__qualname__} ")]
            owners[f"{type(each).__qualname__} {len(kinds)}"] = each
    names = {*inspect.signature(Trainer.__init__).parameters, "model_wrapped", "continuation", "accelerator"}
    live = {**vars(handler), **{name: getattr(trainer, name, None) for name in names}}
    live |= {
        f"model.{name}": each
        for kind in ("modules", "parameters")
        for name, each in getattr(trainer.model, f"named_{kind}")()
    }
    return Attributes(owners, {name: each for name, each in live.items() if each is not None})
