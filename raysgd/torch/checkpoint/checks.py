"""Whether a checkpoint's content fits an operator: all of it is looked at before any of it is taken.

What only a user's own class can tell (the operator's state, an optimizer of somebody else's) is found out when it is
taken; `undo` puts back what there was when it fails.
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
from raysgd.torch.operator import TrainingOperator

__all__ = ["check_fits"]

# Options whose value says how a step is computed; None leaves the choice to torch.
CHOICES = {"foreach", "fused", "capturable", "differentiable", "maximize", "decoupled_weight_decay"}
# What a scheduler has for each parameter group; its other lists may have another length than here.
BY_GROUP = {
    "base_lrs",
    "_last_lr",
    "min_lrs",
    "max_lrs",
    "base_momentums",
    "max_momentums",
    "lr_lambdas",
    "_schedulers",
}


def check_fits(operator: TrainingOperator, state: dict[str, Any], *, metadata_only: bool = False) -> None:
    """Raise CheckpointError, with what does not fit. Nothing is changed. A `metadata_only` state has tensors without content."""
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
            f"its content is not as save() writes it, and cannot be checked ({type(error).__name__}: {error})"
        ) from error


def _check_parts(operator: TrainingOperator, state: dict[str, Any], *, metadata_only: bool) -> None:
    parts = operator._parts
    for name in ("models", "optimizers", "schedulers"):
        theirs = state.get(name) or []
        if not isinstance(theirs, (list, tuple)):
            raise CheckpointError(f"the checkpoint's {name} are a {type(theirs).__name__}, and not a list")
        mine = len(getattr(parts, name))
        if mine != len(theirs):
            raise CheckpointError(f"the checkpoint has {len(theirs)} {name}, and this operator registers {mine}")
    for number, (model, saved) in enumerate(zip(parts.models, state["models"], strict=True)):
        _check_model(number, model.state_dict(), saved, metadata_only=metadata_only)
    for number, (optimizer, saved) in enumerate(zip(parts.optimizers, state["optimizers"], strict=True)):
        _check_optimizer(number, optimizer, saved, ours="format" in state, metadata_only=metadata_only)
    for number, (scheduler, saved) in enumerate(zip(parts.schedulers, state.get("schedulers") or [], strict=True)):
        _check_scheduler(number, scheduler, saved)
    precision = operator._precision
    scaler = scaler_of(state, precision.key)
    if precision.key and scaler:
        _check_scaler(precision.state() or {}, scaler)


# -- models -------------------------------------------------------------------------------------------


def _check_model(number: int, mine: dict[str, Any], saved: Any, *, metadata_only: bool) -> None:
    missing, foreign = (sorted(map(str, each)) for each in (mine.keys() - saved.keys(), saved.keys() - mine.keys()))
    if missing or foreign:
        raise CheckpointError(
            f"model {number} does not fit the checkpoint: missing there {missing[:4] or 'none'}, "
            f"unknown here {foreign[:4] or 'none'}"
        )
    for name, value in mine.items():
        if isinstance(value, torch.Tensor):
            _check_tensor(f"model {number}: {name}", value, saved[name], metadata_only=metadata_only)
        elif isinstance(saved[name], torch.Tensor):
            raise CheckpointError(f"model {number}: {name} is a {type(value).__name__} here and a tensor there")
    versions = getattr(saved, "_metadata", None) or {}
    fits = isinstance(versions, Mapping) and all(isinstance(each, Mapping) for each in versions.values())
    if not fits or any(
        type(each.get("version")) not in (int, type(None)) or "assign_to_params_buffers" in each
        for each in versions.values()
    ):
        raise CheckpointError(f"model {number}: the versions of its modules are not as torch writes them")


def _check_tensor(where: str, mine: torch.Tensor, saved: Any, *, metadata_only: bool) -> None:
    if not isinstance(saved, torch.Tensor):
        raise CheckpointError(f"{where} is a tensor here and a {type(saved).__name__} in the checkpoint")
    if not is_lazy(mine) and mine.shape != saved.shape:
        raise CheckpointError(f"{where} has shape {tuple(mine.shape)} here and {tuple(saved.shape)} in the checkpoint")
    if kind_of(mine) != kind_of(saved) or (saved.is_meta and not metadata_only and not mine.is_meta):
        raise CheckpointError(f"{where} is {_shown(mine)} here and {_shown(saved)} in the checkpoint")


def kind_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What one tensor must have in common with another that is copied into it: width of numbers aside."""
    return tensor.is_floating_point(), tensor.is_complex(), tensor.is_quantized, tensor.layout, tensor.is_nested


def _shown(tensor: torch.Tensor) -> str:
    return f"a {tensor.layout} tensor of {tensor.dtype}{' without content' if tensor.is_meta else ''}"


# -- optimizers ---------------------------------------------------------------------------------------


def _check_optimizer(number: int, optimizer: Any, saved: Any, *, ours: bool, metadata_only: bool) -> None:
    ordinary = isinstance(optimizer, torch.optim.Optimizer) and not _has_own_state(optimizer)
    if not ordinary and "param_groups" not in saved:
        return  # an optimizer of the user's own may keep its state in another way
    groups, state = saved.get("param_groups"), saved.get("state", {})
    if not isinstance(groups, list) or not isinstance(state, Mapping):
        raise CheckpointError(f"optimizer {number} has no list of parameter groups and no state in the checkpoint")
    if not all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups):
        raise CheckpointError(f"optimizer {number} has a parameter group without parameters in the checkpoint")
    _check_groups(number, optimizer.param_groups, groups)
    if ordinary:
        _check_numbers(number, groups, state, ours=ours)
        for mine, theirs in zip(optimizer.param_groups, groups, strict=True):
            _check_options(number, mine, theirs)
        _check_states(number, optimizer, saved)
        if not metadata_only and not try_optimizer(number, optimizer, {**saved, "state": state}):
            _check_shapes(number, optimizer, saved)


def _has_own_state(optimizer: Any) -> bool:
    given, torchs = type(optimizer), torch.optim.Optimizer
    return given.state_dict is not torchs.state_dict or given.load_state_dict is not torchs.load_state_dict


def _check_groups(number: int, mine: list[dict[str, Any]], saved: list[Any]) -> None:
    here, there = ([len(group["params"]) for group in groups] for groups in (mine, saved))
    if here != there:
        raise CheckpointError(
            f"optimizer {number} has parameter groups of {here} tensors here, and {there} in the checkpoint"
        )
    # A newer torch may know more options than the one that saved; options missing on both sides are another optimizer's.
    ours, theirs = ({str(name) for group in groups for name in group} for groups in (mine, saved))
    if ours - theirs and theirs - ours:
        raise CheckpointError(
            f"optimizer {number} is of another kind: it has {sorted(ours - theirs)[:4]} here, and "
            f"{sorted(theirs - ours)[:4]} in the checkpoint"
        )


def _check_numbers(number: int, groups: list[Any], state: Mapping[Any, Any], *, ours: bool) -> None:
    """Parameters are counted through all groups. (Very old versions of torch wrote other numbers.)"""
    listed = [each for group in groups for each in group["params"]]
    counted = listed == list(range(len(listed)))
    known = set(listed) if all(type(each) is int for each in listed) else set()
    if len(known) != len(listed) or (ours and not counted):
        raise CheckpointError(f"optimizer {number}: its parameters are not numbered from 0 on in the checkpoint")
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
                f"optimizer {number}: {name} is {value!r:.60} here and {saved[name]!r:.60} in the checkpoint, which is of "
                "another type"
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
    """The state of each parameter: named values, tensors that have content, and counts of steps."""
    kinds = set()
    for key, values in saved["state"].items():
        if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
            raise CheckpointError(f"optimizer {number}: the state of parameter {key} has no names in the checkpoint")
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and (value.layout != torch.strided or value.is_quantized):
                raise CheckpointError(f"optimizer {number}: {name} of parameter {key} is {_shown(value)}")
        step = values.get("step")
        if step is not None:
            kinds.add(isinstance(step, torch.Tensor))
            _check_step(number, key, step)
    if len(kinds) > 1 and is_torchs(optimizer, "torch.optim"):
        raise CheckpointError(f"optimizer {number} has counts of steps of two types in the checkpoint")


def _check_step(number: int, key: int, step: Any) -> None:
    if isinstance(step, torch.Tensor):
        if step.is_meta:
            return
        step = step.item() if step.numel() == 1 and not step.is_complex() else None
    if not is_number(step) or not math.isfinite(step) or step < 0:
        raise CheckpointError(f"optimizer {number}: the count of steps of parameter {key} is {step!r:.60}")


def _check_shapes(number: int, optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Of an optimizer that cannot be tried: as far as its parameters and its present state tell."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    listed = [each for group in saved["param_groups"] for each in group["params"]]
    total = sum(each.numel() for each in parameters)
    for key, parameter in zip(listed, parameters, strict=True):
        here = optimizer.state.get(parameter, {})
        for name, value in (saved["state"].get(key) or {}).items():
            mine = here.get(name)
            fits = True
            if isinstance(mine, torch.Tensor) and mine.shape == parameter.shape:
                fits = isinstance(value, torch.Tensor) and value.shape == mine.shape
            elif isinstance(value, torch.Tensor) and is_torchs(optimizer, "torch.optim"):
                fits = _is_shaped_like(value, parameter) or value.numel() == total
            if not fits:
                raise CheckpointError(
                    f"optimizer {number}: {name} of parameter {key} has another shape than the parameter: "
                    f"{tuple(getattr(value, 'shape', ()))} and {tuple(parameter.shape)}"
                )


def _is_shaped_like(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Of the same shape, or reduced to one value along some of its dimensions."""
    pairs = zip(value.shape, parameter.shape, strict=False)
    return value.numel() == 1 or (value.dim() == parameter.dim() and all(a in (1, b) for a, b in pairs))


# -- schedulers and the scaler ------------------------------------------------------------------------


def _check_scheduler(number: int, scheduler: Any, saved: Any) -> None:
    here = scheduler.state_dict()
    if not isinstance(here, Mapping):
        return
    if not isinstance(saved, Mapping) or not all(isinstance(name, str) for name in saved):
        raise CheckpointError(f"scheduler {number} has no named state in the checkpoint")
    # Private attributes differ between versions of torch.
    mine, theirs = ({name for name in each if name[:1] != "_"} - {"verbose"} for each in (here, saved))
    if mine - theirs and theirs - mine:
        raise CheckpointError(
            f"scheduler {number} is of another kind: it has {sorted(mine - theirs)[:4]} here, and "
            f"{sorted(theirs - mine)[:4]} in the checkpoint"
        )
    for name in here.keys() & saved.keys():
        if not same_kind(here[name], saved[name], as_long=name in BY_GROUP):
            raise CheckpointError(
                f"scheduler {number}: {name} is {here[name]!r:.60} here and {saved[name]!r:.60} in the checkpoint, which "
                "is of another type"
            )
    try_scheduler(number, scheduler, saved)


def _check_scaler(mine: Mapping[str, Any], saved: Any) -> None:
    if not isinstance(saved, Mapping):
        raise CheckpointError("the gradient scaler has no named state in the checkpoint")
    for name, value in mine.items():
        if is_number(value):
            there = saved.get(name)
            whole = isinstance(there, int) or not isinstance(value, int)
            if not is_number(there) or not whole or not math.isfinite(there) or there < 0:
                raise CheckpointError(f"the gradient scaler's {name} is {there!r:.60} in the checkpoint")
        elif not same_kind(value, saved.get(name)):
            raise CheckpointError(f"the gradient scaler's {name} is of another type in the checkpoint")


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def same_kind(mine: Any, saved: Any, *, as_long: bool = True) -> bool:
    """Return whether one plain value can take the place of the other: a number of a number, a list of a list."""
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
