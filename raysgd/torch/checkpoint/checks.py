"""Check that a checkpoint's content fits an operator before any of it is loaded. Worker.

Only loading shows whether a user's own class accepts its state (the operator, an optimizer that is not torch's). If that
fails, `undo` restores what was there before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from raysgd.errors import CheckpointError
from raysgd.torch import foreign
from raysgd.torch.checkpoint.optimizer_checks import check_optimizer, check_scaler, check_scheduler
from raysgd.torch.checkpoint.position_checks import check_counters, check_loader, check_random
from raysgd.torch.checkpoint.states import scaler_of
from raysgd.torch.operator import TrainingOperator

__all__ = ["check_fits"]

DEEPEST = 100
SHARED = 100_000
EXPANDED = 64 << 20
CONTAINERS = (list, tuple, Mapping, set, frozenset)


def check_fits(operator: TrainingOperator, state: dict[str, Any], *, metadata_only: bool = False) -> None:
    """Raise CheckpointError with the first thing that does not fit. Nothing is changed. A `metadata_only` state has tensors
    without content."""
    try:
        _check_size(state)
        check_counters(state)
        _check_parts(operator, state, metadata_only=metadata_only)
        check_loader(operator, state)
        check_random(state)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"its content is not what save() writes, and cannot be checked ({type(error).__name__}: {error})"
        ) from error


def _check_parts(operator: TrainingOperator, state: dict[str, Any], *, metadata_only: bool) -> None:
    parts = operator._parts
    for name in ("models", "optimizers", "schedulers"):
        saved_parts, registered = state.get(name) or [], len(getattr(parts, name))
        if not isinstance(saved_parts, (list, tuple)):
            raise CheckpointError(f"the checkpoint's {name} must be a list, and are a {type(saved_parts).__name__}")
        if registered != len(saved_parts):
            raise CheckpointError(
                f"the checkpoint has {len(saved_parts)} {name}, and this operator registers {registered}"
            )
    for number, (model, saved) in enumerate(zip(parts.models, state["models"], strict=True)):
        _check_model(number, model.state_dict(), saved, metadata_only=metadata_only)
    for number, (optimizer, saved) in enumerate(zip(parts.optimizers, state["optimizers"], strict=True)):
        check_optimizer(number, optimizer, saved, v1="format" not in state, metadata_only=metadata_only)
    for number, (scheduler, saved) in enumerate(zip(parts.schedulers, state.get("schedulers") or [], strict=True)):
        check_scheduler(number, scheduler, saved)
    precision = operator._precision
    scaler = scaler_of(state, precision.key)
    if precision.key and scaler:
        check_scaler(precision.state() or {}, scaler)


def _check_model(number: int, mine: dict[str, Any], saved: Any, *, metadata_only: bool) -> None:
    missing, unknown = (sorted(map(str, each)) for each in (mine.keys() - saved.keys(), saved.keys() - mine.keys()))
    if missing or unknown:
        raise CheckpointError(
            f"model {number} does not fit the checkpoint: missing in the checkpoint {missing[:4] or 'none'}, "
            f"unknown to the model {unknown[:4] or 'none'}"
        )
    for name, value in mine.items():
        if isinstance(value, torch.Tensor):
            _check_tensor(f"model {number}: {name}", value, saved[name], metadata_only=metadata_only)
        elif isinstance(saved[name], torch.Tensor):
            raise CheckpointError(
                f"model {number}: {name} is a {type(value).__name__} here and a tensor in the checkpoint"
            )
    versions = foreign.module_versions(saved) or {}
    fits = isinstance(versions, Mapping) and all(isinstance(each, Mapping) for each in versions.values())
    if not fits or any(
        type(each.get("version")) not in (int, type(None)) or "assign_to_params_buffers" in each
        for each in versions.values()
    ):
        raise CheckpointError(f"model {number}: the versions of its modules are not what torch writes")


def _check_tensor(where: str, mine: torch.Tensor, saved: Any, *, metadata_only: bool) -> None:
    if not isinstance(saved, torch.Tensor):
        raise CheckpointError(f"{where} is a tensor here and a {type(saved).__name__} in the checkpoint")
    if not is_lazy(mine) and mine.shape != saved.shape:
        raise CheckpointError(f"{where} has shape {tuple(mine.shape)} here and {tuple(saved.shape)} in the checkpoint")
    if _kind_of(mine) != _kind_of(saved) or (saved.is_meta and not metadata_only and not mine.is_meta):
        raise CheckpointError(f"{where} is {_shown(mine)} here and {_shown(saved)} in the checkpoint")


def _kind_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what a tensor must have in common with another one that is copied into it. The dtypes' widths can differ."""
    return tensor.is_floating_point(), tensor.is_complex(), tensor.is_quantized, tensor.layout, tensor.is_nested


def _shown(tensor: torch.Tensor) -> str:
    return f"a {tensor.layout} tensor of {tensor.dtype}{' without content' if tensor.is_meta else ''}"


# -- the size of a state ------------------------------------------------------------------------------
# Python objects can share parts, and tensors can have more elements than their storage. So the state of a small file can
# become huge when it is copied.


def _check_size(state: dict[str, Any]) -> None:
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
            _check_expansion(name, part, set())


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


def _check_expansion(name: str, value: Any, seen: set[int]) -> None:
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided and not value.is_meta and not hasattr(value, "full_tensor"):
            claimed, stored = value.numel() * value.element_size(), value.untyped_storage().nbytes()
            if claimed > stored + EXPANDED:
                raise CheckpointError(f"a tensor in {name} claims {claimed} bytes, and the file has {stored} for it")
    elif isinstance(value, CONTAINERS) and id(value) not in seen:
        seen.add(id(value))
        for each in _values(value):
            _check_expansion(name, each, seen)


def _values(container: Any) -> Iterator[Any]:
    return iter(dict.values(container) if isinstance(container, dict) else container)
