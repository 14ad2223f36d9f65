"""Whether a loaded state has a size that its file explains: Python objects can share parts, and tensors can claim more
elements than their storage has, so that a small file unfolds into something huge when it is copied."""

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
    that it takes."""
    whole = _Measured()
    unfolded = whole.unfold(state)
    if unfolded > 4 * whole.objects + SHARED:
        raise CheckpointError(
            f"its {whole.objects} values share parts in a way that unfolds them to {unfolded}: copying it would not end"
        )
    for name, part in state.items():
        if name != "models":  # a model's tensors are compared with those that are here
            _check_tensors(name, part)


def _check_tensors(name: str, part: Any) -> None:
    for tensor in _tensors(part):
        if tensor.layout == torch.strided and not tensor.is_meta and not hasattr(tensor, "full_tensor"):
            claimed, there = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
            if claimed > there + EXPANDED:
                raise CheckpointError(f"a tensor in {name} claims {claimed} bytes, and the file has {there} for it")


class _Measured:
    """Counts the values in nested containers: each once (`objects`), and as often as it is referred to (`unfold`)."""

    def __init__(self) -> None:
        self.objects = 0
        self._unfolded: dict[int, int] = {}

    def unfold(self, state: Any) -> int:
        """Return how many values there are, counting shared parts each time."""
        path: list[tuple[Any, Iterator[Any]]] = [(state, self._inner(state))]
        open_ids = {id(state)}
        while path:
            container, rest = path[-1]
            inner = next(rest, None)
            if inner is None:
                path.pop()
                open_ids.discard(id(container))
                parts = sum(self._unfolded[id(each)] for each in _containers(container))
                self._unfolded[id(container)] = len(container) + 1 + parts
            elif id(inner) in open_ids:
                raise CheckpointError("it has a list or dictionary that contains itself")
            elif id(inner) not in self._unfolded:
                if len(path) >= DEEPEST:
                    raise CheckpointError(f"its lists and dictionaries are nested in more than {DEEPEST} levels")
                path.append((inner, self._inner(inner)))
                open_ids.add(id(inner))
        return self._unfolded[id(state)]

    def _inner(self, container: Any) -> Iterator[Any]:
        self.objects += len(container) + 1
        return _containers(container)


def _containers(container: Any) -> Iterator[Any]:
    values = dict.values(container) if isinstance(container, dict) else container
    return (each for each in values if isinstance(each, CONTAINERS))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested containers; each container once."""
    seen: set[int] = set()
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, CONTAINERS) and id(each) not in seen:
            seen.add(id(each))
            left += (
                inner
                for inner in (dict.values(each) if isinstance(each, dict) else each)
                if isinstance(inner, (torch.Tensor, *CONTAINERS))
            )
