"""Refuse a loaded state that is much larger than its file explains. Worker.

Python objects can share parts, and tensors can have more elements than their storage, so that copying the state of a small
file would need a huge amount of memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from raysgd.errors import CheckpointError

__all__ = ["check_structure"]

DEEPEST = 100
SHARED = 100_000
EXPANDED = 64 << 20
CONTAINERS = (list, tuple, Mapping, set, frozenset)


def check_structure(state: dict[str, Any]) -> None:
    """Raise CheckpointError for a state that is nested too deeply, contains itself, or is much larger than the memory
    that it occupies."""
    counter = _Counter()
    total = counter.total(state)
    if total > 4 * counter.distinct + SHARED:
        raise CheckpointError(
            f"its {counter.distinct} values share parts so that a copy would have {total} values, which is too many"
        )
    for name, part in state.items():
        if name != "models":  # a model's tensors are compared with those of the registered model
            _check_tensors(name, part, set())


class _Counter:
    """Counts the values in nested containers: shared ones once in `distinct`, and each time in `total`."""

    def __init__(self) -> None:
        self.distinct = 0
        self._totals: dict[int, int] = {}

    def total(self, container: Any, outer: tuple[int, ...] = ()) -> int:
        this = id(container)
        if this in outer:
            raise CheckpointError("one of its lists or dictionaries contains itself")
        if this not in self._totals:
            if len(outer) >= DEEPEST:
                raise CheckpointError(f"its lists and dictionaries are nested more than {DEEPEST} levels deep")
            self.distinct += len(container) + 1
            inner = sum(self.total(each, (*outer, this)) for each in _values(container) if isinstance(each, CONTAINERS))
            self._totals[this] = len(container) + 1 + inner
        return self._totals[this]


def _check_tensors(name: str, value: Any, seen: set[int]) -> None:
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided and not value.is_meta and not hasattr(value, "full_tensor"):
            claimed, stored = value.numel() * value.element_size(), value.untyped_storage().nbytes()
            if claimed > stored + EXPANDED:
                raise CheckpointError(f"a tensor in {name} claims {claimed} bytes, and the file has {stored} for it")
    elif isinstance(value, CONTAINERS) and id(value) not in seen:
        seen.add(id(value))
        for each in _values(value):
            _check_tensors(name, each, seen)


def _values(container: Any) -> Iterator[Any]:
    return iter(dict.values(container) if isinstance(container, dict) else container)
