"""Check that the saved states of optimizers and schedulers are of the kind, and for the parameters,
that are registered. Worker."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import torch

from raysgd.errors import CheckpointError


def check_optimizer(number: int, optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the saved state is that of another optimizer, or of other
    parameters. The optimizer of a user may have a state of any form."""
    ordinary = isinstance(optimizer, torch.optim.Optimizer) and not _has_own_state(optimizer)
    if not ordinary and "param_groups" not in saved:
        return
    groups, saved_groups = optimizer.param_groups, saved["param_groups"]
    sizes, saved_sizes = ([len(group["params"]) for group in each] for each in (groups, saved_groups))
    if sizes != saved_sizes:
        raise CheckpointError(
            f"optimizer {number} has parameter groups of {sizes} tensors here, and {saved_sizes} in the checkpoint"
        )
    names, saved_names = ({str(name) for group in each for name in group} for each in (groups, saved_groups))
    _check_kind(f"optimizer {number}", names, saved_names)
    if ordinary:
        for mine, theirs in zip(groups, saved_groups, strict=True):
            _check_group(number, mine, theirs)
        _check_shapes(number, optimizer, saved)


def _has_own_state(optimizer: Any) -> bool:
    own, base = type(optimizer), torch.optim.Optimizer
    return own.state_dict is not base.state_dict or own.load_state_dict is not base.load_state_dict


def _check_kind(what: str, names: set[str], saved_names: set[str]) -> None:
    """Raise CheckpointError if each side has names that the other lacks: not only a version."""
    if names - saved_names and saved_names - names:
        raise CheckpointError(
            f"{what} is of another kind: it has {sorted(names - saved_names)[:4]} here, and "
            f"{sorted(saved_names - names)[:4]} in the checkpoint"
        )


def _check_group(number: int, mine: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Check that a group has all options of this kind of optimizer, which are numbers or tuples of
    them, and the same parameters, if their names are known. (Other versions of torch add or lack
    flags, which take their values from here.)"""
    for name, value in mine.items():
        is_flag = isinstance(value, bool) or not isinstance(value, (numbers.Real, tuple, list, str))
        if name not in saved and not is_flag and name != "param_names":
            raise CheckpointError(f"optimizer {number} is of another kind: {name} is missing in the checkpoint")
    names, saved_names = mine.get("param_names"), saved.get("param_names")
    if names and saved_names and list(names) != list(saved_names):
        one, other = next(each for each in zip(names, saved_names, strict=True) if each[0] != each[1])
        raise CheckpointError(
            f"optimizer {number} has its parameters in another order: {one} here is at the place of {other} in the checkpoint"
        )


def _check_shapes(number: int, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Compare the shapes of each parameter's state with the parameter, or its state here."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    keys = [each for group in saved["param_groups"] for each in group["params"]]
    total = sum(each.numel() for each in parameters)  # LBFGS has one state for all
    of_torch = type(optimizer).__module__.startswith("torch.optim")
    for key, parameter in zip(keys, parameters, strict=True):
        present = optimizer.state.get(parameter, {})
        for name, value in saved["state"].get(key, {}).items():
            if not isinstance(value, torch.Tensor):
                continue
            mine = present.get(name)
            fits = value.numel() in (1, total) or _is_shaped_like(value, parameter) or not of_torch
            if isinstance(mine, torch.Tensor) and mine.shape == parameter.shape:
                fits = value.shape == mine.shape
            if not fits:
                raise CheckpointError(
                    f"optimizer {number}: {name} of parameter {key} has shape {tuple(value.shape)} in the checkpoint, which does "
                    f"not fit the parameter's shape {tuple(parameter.shape)}"
                )


def _is_shaped_like(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether it has the parameter's shape, or one reduced along dimensions (Adafactor)."""
    return value.dim() == parameter.dim() and all(
        a in (1, b) for a, b in zip(value.shape, parameter.shape, strict=True)
    )


def check_scheduler(number: int, scheduler: Any, saved: Any) -> None:
    """Raise CheckpointError if the saved state is that of another kind of scheduler."""
    here = scheduler.state_dict()
    if isinstance(here, Mapping) and isinstance(saved, Mapping):
        # Private attributes differ between versions of torch.
        names, saved_names = ({name for name in each if name[:1] != "_"} - {"verbose"} for each in (here, saved))
        _check_kind(f"scheduler {number}", names, saved_names)
