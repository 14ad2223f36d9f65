"""Check that a checkpoint's content fits an operator before any of it is loaded. Worker.

Only loading shows whether a user's own class accepts its state (the operator, an optimizer that is not torch's). If that
fails, `undo` restores what was there before.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch.nn.parameter import is_lazy

from raysgd.errors import CheckpointError
from raysgd.torch.checkpoint import position_checks
from raysgd.torch.checkpoint.states import scaler_of
from raysgd.torch.checkpoint.structure import check_structure
from raysgd.torch.checkpoint.trials import is_torchs, try_optimizer, try_scheduler
from raysgd.torch.operator_base import OperatorBase

__all__ = ["check_fits"]

# Options that can be True or False, or None to let torch choose.
CHOICES = {"foreach", "fused", "capturable", "differentiable", "maximize", "decoupled_weight_decay"}
# A scheduler's lists with one value for each parameter group. Its other lists can differ in length from those here.
BY_GROUP = {
    "base_lrs",
    "min_lrs",
    "max_lrs",
    "base_momentums",
    "max_momentums",
    "lr_lambdas",
    "_last_lr",
    "_schedulers",
}


def check_fits(operator: OperatorBase, state: dict[str, Any], *, metadata_only: bool = False) -> None:
    """Raise CheckpointError with the first thing that does not fit. Nothing is changed. A `metadata_only` state has tensors
    without content."""
    try:
        check_structure(state)
        position_checks.check_counters(state)
        _check_parts(operator, state, metadata_only=metadata_only)
        position_checks.check_loader(operator, state)
        position_checks.check_random(state)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"its content is not what save() writes, and cannot be checked ({type(error).__name__}: {error})"
        ) from error


def _check_parts(operator: OperatorBase, state: dict[str, Any], *, metadata_only: bool) -> None:
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
        _check_optimizer(number, optimizer, saved, v1="format" not in state, metadata_only=metadata_only)
    for number, (scheduler, saved) in enumerate(zip(parts.schedulers, state.get("schedulers") or [], strict=True)):
        _check_scheduler(number, scheduler, saved)
    precision = operator._precision
    scaler = scaler_of(state, precision.key)
    if precision.key and scaler:
        _check_scaler(precision.state() or {}, scaler)


# -- models -------------------------------------------------------------------------------------------


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
    versions = getattr(saved, "_metadata", None) or {}
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
    if kind_of(mine) != kind_of(saved) or (saved.is_meta and not metadata_only and not mine.is_meta):
        raise CheckpointError(f"{where} is {_shown(mine)} here and {_shown(saved)} in the checkpoint")


def kind_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return what a tensor must have in common with another one that is copied into it. The dtypes' widths can differ."""
    return tensor.is_floating_point(), tensor.is_complex(), tensor.is_quantized, tensor.layout, tensor.is_nested


def _shown(tensor: torch.Tensor) -> str:
    return f"a {tensor.layout} tensor of {tensor.dtype}{' without content' if tensor.is_meta else ''}"


# -- optimizers ---------------------------------------------------------------------------------------


def _check_optimizer(number: int, optimizer: Any, saved: Any, *, v1: bool, metadata_only: bool) -> None:
    ordinary = isinstance(optimizer, torch.optim.Optimizer) and not _has_own_state(optimizer)
    if not ordinary and "param_groups" not in saved:
        return  # a user's own optimizer may have a state of another form
    groups, state = saved.get("param_groups"), saved.get("state", {})
    if not isinstance(groups, list) or not isinstance(state, Mapping):
        raise CheckpointError(f"optimizer {number} must have a list of parameter groups and a state in the checkpoint")
    if not all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups):
        raise CheckpointError(
            f"optimizer {number} has a parameter group without a list of parameters in the checkpoint"
        )
    _check_groups(number, optimizer.param_groups, groups)
    if ordinary:
        _check_keys(number, groups, state, v1=v1)
        for mine, saved_group in zip(optimizer.param_groups, groups, strict=True):
            _check_options(number, mine, saved_group)
        _check_states(number, optimizer, saved)
        if not metadata_only and not try_optimizer(number, optimizer, {**saved, "state": state}):
            _check_shapes(number, optimizer, saved)


def _has_own_state(optimizer: Any) -> bool:
    own, base = type(optimizer), torch.optim.Optimizer
    return own.state_dict is not base.state_dict or own.load_state_dict is not base.load_state_dict


def _check_groups(number: int, mine: list[dict[str, Any]], saved: list[Any]) -> None:
    sizes, saved_sizes = ([len(group["params"]) for group in groups] for groups in (mine, saved))
    if sizes != saved_sizes:
        raise CheckpointError(
            f"optimizer {number} has parameter groups of {sizes} tensors here, and {saved_sizes} in the checkpoint"
        )
    names, saved_names = ({str(name) for group in groups for name in group} for groups in (mine, saved))
    _check_kind(f"optimizer {number}", names, saved_names)


def _check_kind(what: str, names: set[str], saved_names: set[str]) -> None:
    """Another version of torch may have more names. If both sides have names that the other lacks, the classes differ."""
    if names - saved_names and saved_names - names:
        raise CheckpointError(
            f"{what} is of another kind: it has {sorted(names - saved_names)[:4]} here, and "
            f"{sorted(saved_names - names)[:4]} in the checkpoint"
        )


def _check_keys(number: int, groups: list[Any], state: Mapping[Any, Any], *, v1: bool) -> None:
    """The parameters of all groups are numbered from 0. (Very old versions of torch wrote other numbers.)"""
    listed = [each for group in groups for each in group["params"]]
    known = set(listed) if all(type(each) is int for each in listed) else set()
    if len(known) != len(listed) or not (v1 or listed == list(range(len(listed)))):
        raise CheckpointError(f"optimizer {number}: its parameters are not numbered from 0 in the checkpoint")
    unknown = [each for each in state if type(each) is not int or each not in known]
    if unknown:
        raise CheckpointError(f"optimizer {number} has state of the unknown parameter {unknown[0]!r:.40}")


def _check_options(number: int, mine: dict[str, Any], saved: Mapping[str, Any]) -> None:
    for name, value in mine.items():
        if name == "params":
            continue
        if name not in saved:
            if is_number(value) or isinstance(value, (tuple, list, str)):
                raise CheckpointError(f"optimizer {number}: {name} is missing in the checkpoint")
        elif not _is_option(name, value, saved[name]):
            raise CheckpointError(
                f"optimizer {number}: {name} is {value!r:.60} here and {saved[name]!r:.60} in the checkpoint, which "
                "has another type"
            )


def _is_option(name: str, mine: Any, saved: Any) -> bool:
    if isinstance(saved, torch.Tensor):  # a learning rate may be one
        number = saved.numel() == 1 and saved.dim() == 0 and not saved.is_complex() and saved.dtype != torch.bool
        return number and (isinstance(mine, torch.Tensor) or is_number(mine))
    if isinstance(mine, torch.Tensor):
        return is_number(saved)
    if name in CHOICES:
        return saved is None or isinstance(saved, bool)
    return same_kind(mine, saved)


def _check_states(number: int, optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Check the state of each parameter: it has names, its tensors are ordinary ones, and step counts have one type."""
    types = set()
    for key, values in saved["state"].items():
        if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
            raise CheckpointError(f"optimizer {number}: the state of parameter {key} must have names in the checkpoint")
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and (value.layout != torch.strided or value.is_quantized):
                raise CheckpointError(f"optimizer {number}: {name} of parameter {key} is {_shown(value)}")
        step = values.get("step")
        if step is not None:
            types.add(isinstance(step, torch.Tensor))
            _check_step(number, key, step)
    if len(types) > 1 and is_torchs(optimizer, "torch.optim"):
        raise CheckpointError(f"optimizer {number} has step counts of two types in the checkpoint")


def _check_step(number: int, key: int, step: Any) -> None:
    if isinstance(step, torch.Tensor):
        if step.is_meta:
            return
        step = step.item() if step.numel() == 1 and not step.is_complex() else None
    if not is_number(step) or not math.isfinite(step) or step < 0:
        raise CheckpointError(f"optimizer {number}: the step count of parameter {key} is {step!r:.60}")


def _check_shapes(number: int, optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Compare the state of an optimizer that cannot be tried with its parameters and with its present state."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    listed = [each for group in saved["param_groups"] for each in group["params"]]
    total = sum(each.numel() for each in parameters)
    for key, parameter in zip(listed, parameters, strict=True):
        present = optimizer.state.get(parameter, {})
        for name, value in (saved["state"].get(key) or {}).items():
            mine = present.get(name)
            fits = True
            if isinstance(mine, torch.Tensor) and mine.shape == parameter.shape:
                fits = isinstance(value, torch.Tensor) and value.shape == mine.shape
            elif isinstance(value, torch.Tensor) and is_torchs(optimizer, "torch.optim"):
                fits = _is_shaped_like(value, parameter) or value.numel() == total
            if not fits:
                raise CheckpointError(
                    f"optimizer {number}: {name} of parameter {key} has shape {tuple(getattr(value, 'shape', ()))} in the "
                    f"checkpoint, which does not fit the parameter's shape {tuple(parameter.shape)}"
                )


def _is_shaped_like(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether it has the parameter's shape, or one that is reduced to one value along some dimensions."""
    pairs = zip(value.shape, parameter.shape, strict=False)
    return value.numel() == 1 or (value.dim() == parameter.dim() and all(a in (1, b) for a, b in pairs))


# -- schedulers and the scaler ------------------------------------------------------------------------


def _check_scheduler(number: int, scheduler: Any, saved: Any) -> None:
    here = scheduler.state_dict()
    if not isinstance(here, Mapping):
        return
    if not isinstance(saved, Mapping) or not all(isinstance(name, str) for name in saved):
        raise CheckpointError(f"scheduler {number} must have a state with names in the checkpoint")
    # Private attributes differ between versions of torch.
    names, saved_names = ({name for name in each if name[:1] != "_"} - {"verbose"} for each in (here, saved))
    _check_kind(f"scheduler {number}", names, saved_names)
    for name in here.keys() & saved.keys():
        if not same_kind(here[name], saved[name], as_long=name in BY_GROUP):
            raise CheckpointError(
                f"scheduler {number}: {name} is {here[name]!r:.60} here and {saved[name]!r:.60} in the checkpoint, which "
                "has another type"
            )
    try_scheduler(number, scheduler, saved)


def _check_scaler(mine: Mapping[str, Any], saved: Any) -> None:
    if not isinstance(saved, Mapping):
        raise CheckpointError("the gradient scaler must have a state with names in the checkpoint")
    for name, value in mine.items():
        if is_number(value):
            given = saved.get(name)
            same_type = isinstance(given, int) or not isinstance(value, int)
            if not is_number(given) or not same_type or not math.isfinite(given) or given < 0:
                raise CheckpointError(f"the gradient scaler's {name} is {given!r:.60} in the checkpoint")
        elif not same_kind(value, saved.get(name)):
            raise CheckpointError(f"the gradient scaler's {name} has another type in the checkpoint")


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def same_kind(mine: Any, saved: Any, *, as_long: bool = True) -> bool:
    """Return whether one plain value can replace the other: a number a number, a list a list."""
    if mine is None or saved is None:
        return mine is None or not (is_number(mine) or isinstance(mine, (tuple, list, str)))
    if is_number(mine):
        return is_number(saved)
    if isinstance(mine, bool):
        return isinstance(saved, bool)
    if isinstance(mine, (tuple, list)):
        fits = isinstance(saved, (tuple, list)) and (len(mine) == len(saved) or not as_long)
        return fits and all(same_kind(here, there) for here, there in zip(mine, saved, strict=False))
    if isinstance(mine, Mapping):
        return isinstance(saved, Mapping)
    return isinstance(saved, type(mine))
