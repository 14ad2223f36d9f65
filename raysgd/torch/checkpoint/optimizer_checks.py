"""Check the saved states of optimizers, schedulers and the gradient scaler: compare them, and try a step with them. Worker.

A step is tried on a copy without weights, and only with torch's own classes, because a step of another class can have
unknown side effects.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import math
import numbers
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch

from raysgd.errors import CheckpointError
from raysgd.torch import foreign
from raysgd.torch.checkpoint.states import completed
from raysgd.torch.schedules import OWN_STATE

__all__ = ["check_optimizer", "check_scaler", "check_scheduler"]

logger = logging.getLogger(__name__)

# Options that can be True or False, or None to let torch choose.
CHOICES = {"foreach", "fused", "capturable", "differentiable", "maximize", "decoupled_weight_decay"}
# Options that choose how a step is computed, but do not change its result. A copy without weights has its own.
IMPLEMENTATION = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}
# A scheduler's lists with one value for each parameter group. Its other lists can differ in length from those here.
LISTS = ("base_lrs", "min_lrs", "max_lrs", "base_momentums", "max_momentums", "lr_lambdas", "_last_lr", "_schedulers")


def check_optimizer(number: int, optimizer: Any, saved: Any, *, v1: bool, metadata_only: bool) -> None:
    """Raise CheckpointError if the saved state does not fit the optimizer, as far as this can be known without loading it."""
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
        if not metadata_only and not _try_optimizer(number, optimizer, {**saved, "state": state}):
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
    """Raise CheckpointError if both sides have names that the other lacks: another version of torch would only add some."""
    if names - saved_names and saved_names - names:
        raise CheckpointError(
            f"{what} is of another kind: it has {sorted(names - saved_names)[:4]} here, and "
            f"{sorted(saved_names - names)[:4]} in the checkpoint"
        )


def _check_keys(number: int, groups: list[Any], state: Mapping[Any, Any], *, v1: bool) -> None:
    """Check that the parameters of all groups are numbered from 0. (Very old versions of torch wrote other numbers.)"""
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
            if _is_number(value) or isinstance(value, (tuple, list, str)):
                raise CheckpointError(f"optimizer {number}: {name} is missing in the checkpoint")
        elif not _is_option(name, value, saved[name]):
            raise CheckpointError(
                f"optimizer {number}: {name} is {value!r:.60} here and {saved[name]!r:.60} in the checkpoint, which "
                "has another type"
            )


def _is_option(name: str, mine: Any, saved: Any) -> bool:
    if isinstance(saved, torch.Tensor):  # a learning rate may be one
        number = saved.numel() == 1 and saved.dim() == 0 and not saved.is_complex() and saved.dtype != torch.bool
        return number and (isinstance(mine, torch.Tensor) or _is_number(mine))
    if isinstance(mine, torch.Tensor):
        return _is_number(saved)
    if name in CHOICES:
        return saved is None or isinstance(saved, bool)
    return _same_kind(mine, saved)


def _check_states(number: int, optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Check the state of each parameter: it has names, its tensors are ordinary ones, and step counts have one type."""
    step_types = set()
    for key, values in saved["state"].items():
        if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
            raise CheckpointError(f"optimizer {number}: the state of parameter {key} must have names in the checkpoint")
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and (value.layout != torch.strided or value.is_quantized):
                raise CheckpointError(f"optimizer {number}: {name} of parameter {key} must be a dense tensor")
        step = values.get("step")
        if step is not None:
            step_types.add(isinstance(step, torch.Tensor))
            _check_step(number, key, step)
    if len(step_types) > 1 and _is_torchs(optimizer, "torch.optim"):
        raise CheckpointError(f"optimizer {number} has step counts of two types in the checkpoint")


def _check_step(number: int, key: int, step: Any) -> None:
    if isinstance(step, torch.Tensor):
        if step.is_meta:
            return
        step = step.item() if step.numel() == 1 and not step.is_complex() else None
    if not _is_number(step) or not math.isfinite(step) or step < 0:
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
            elif isinstance(value, torch.Tensor) and _is_torchs(optimizer, "torch.optim"):
                fits = _is_shaped_like(value, parameter) or value.numel() == total
            if not fits:
                raise CheckpointError(
                    f"optimizer {number}: {name} of parameter {key} has shape {tuple(getattr(value, 'shape', ()))} in the "
                    f"checkpoint, which does not fit the parameter's shape {tuple(parameter.shape)}"
                )


def _is_shaped_like(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether the value has the parameter's shape, or one that is reduced to one value along some dimensions."""
    pairs = zip(value.shape, parameter.shape, strict=False)
    return value.numel() == 1 or (value.dim() == parameter.dim() and all(a in (1, b) for a, b in pairs))


# -- a step of an optimizer on a copy ---------------------------------------------------------------


def _try_optimizer(number: int, optimizer: Any, saved: dict[str, Any]) -> bool:
    """Return whether the shapes of the state could be compared. Raise CheckpointError if they differ from those of this
    optimizer, or if a step with the saved options and state fails."""
    if not _is_torchs(optimizer, "torch.optim"):
        return False
    saved = completed(saved, optimizer)
    chosen = list(_chosen(optimizer, saved))
    parameters, states = [each for each, _ in chosen], [state for _, state in chosen]
    with _quiet():
        expected = _after_a_step(optimizer, parameters, saved["param_groups"], device="meta")
        if expected is not None:
            _compare(number, expected, states)
        if _after_a_step(optimizer, parameters, optimizer.param_groups, device="cpu") is not None:
            try:
                twin = _twin(optimizer, parameters, saved["param_groups"], device="cpu")
                _load(twin, states)
                type(twin).step(twin)
            except Exception as error:
                raise CheckpointError(
                    f"optimizer {number}: a step with the checkpoint's options and state fails "
                    f"({type(error).__name__}: {error})"
                ) from error
    return expected is not None


def _after_a_step(optimizer: Any, parameters: list[Any], groups: list[Any], device: str) -> list[dict[str, Any]] | None:
    """Return each parameter's state after a first step of a copy, or None for an optimizer that cannot be tried because it
    needs a closure, sparse gradients, or the values of weights."""
    try:
        twin = _twin(optimizer, parameters, groups, device=device)
        type(twin).step(twin)
        return [dict(twin.state[parameter]) for group in twin.param_groups for parameter in group["params"]]
    except Exception as error:
        logger.debug("%s cannot be tried on a copy: %r", type(optimizer).__name__, error)
        return None


def _chosen(optimizer: Any, saved: dict[str, Any]) -> Iterator[tuple[tuple[int, Any], Any]]:
    """Yield one parameter of each kind in each group, with its saved state: those of the same shapes behave alike."""
    seen = set()
    for number, (group, saved_group) in enumerate(zip(optimizer.param_groups, saved["param_groups"], strict=True)):
        for parameter, key in zip(group["params"], saved_group["params"], strict=True):
            state = saved["state"].get(key)
            kind = (number, tuple(parameter.shape), parameter.dtype, _signature(state))
            if kind not in seen:
                seen.add(kind)
                yield (number, parameter), state


def _signature(state: Any) -> Any:
    if state is None:
        return None
    return tuple(
        (name, tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else (name, type(value))
        for name, value in state.items()
    )


def _twin(optimizer: Any, chosen: list[tuple[int, Any]], groups: list[Any], device: str) -> Any:
    """Return an optimizer of the same class with these groups' options, for parameters without memory (on "meta") or with
    one value each."""
    made = []
    for number in sorted({number for number, _ in chosen}):
        options = {name: copy.deepcopy(value) for name, value in groups[number].items() if name != "params"}
        options |= {name: value for name, value in IMPLEMENTATION.items() if name in options}
        options.pop("param_names", None)
        like = [parameter for each, parameter in chosen if each == number]
        made.append({**options, "params": [_substitute(parameter, device) for parameter in like]})
    known = inspect.signature(type(optimizer).__init__).parameters
    names = known.keys() - IMPLEMENTATION.keys()
    return type(optimizer)(made, **{name: value for name, value in optimizer.defaults.items() if name in names})


def _substitute(parameter: Any, device: str) -> torch.nn.Parameter:
    shape = tuple(parameter.shape) if device == "meta" else _tiny(parameter.shape)
    made = torch.nn.Parameter(torch.zeros(shape, dtype=parameter.dtype, device=device))
    made.grad = torch.zeros_like(made)
    return made


def _tiny(shape: Any) -> tuple[int, ...]:
    return tuple(min(length, 1) for length in shape)


def _load(twin: Any, states: list[Any]) -> None:
    content = twin.state_dict()
    content["state"] = {
        number: {name: _small(value) for name, value in state.items()}
        for number, state in enumerate(states)
        if state is not None
    }
    twin.load_state_dict(content)


def _small(value: Any) -> Any:
    """Return a copy of a single value, because the step changes it, and a tensor with one value in place of others."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.numel() == 1 and not hasattr(value, "full_tensor"):
        return value.detach().clone()
    return torch.zeros(_tiny(value.shape), dtype=value.dtype)


def _compare(number: int, expected: list[dict[str, Any]], states: list[Any]) -> None:
    for mine, saved in zip(expected, states, strict=True):
        for name in mine.keys() & (saved or {}).keys():
            if not _fits(mine[name], saved[name]):
                raise CheckpointError(
                    f"optimizer {number}: its state {name!r} is {_shown(mine[name])} here and {_shown(saved[name])} in the "
                    "checkpoint"
                )


def _fits(mine: Any, saved: Any) -> bool:
    if not isinstance(mine, torch.Tensor):
        return mine is None or saved is None or _is_number(mine) == _is_number(saved)
    if not isinstance(saved, torch.Tensor):
        return mine.dim() == 0 and _is_number(saved)
    if mine.dim() == 0:
        return saved.numel() == 1
    kinds = [(each.is_floating_point(), each.is_complex()) for each in (mine, saved)]
    return saved.shape == mine.shape and kinds[0] == kinds[1]


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return f"of type {type(value).__name__}"


# -- schedulers and the scaler ------------------------------------------------------------------------


def check_scheduler(number: int, scheduler: Any, saved: Any) -> None:
    """Raise CheckpointError if the saved state does not fit the scheduler."""
    here = scheduler.state_dict()
    if not isinstance(here, Mapping):
        return
    if not isinstance(saved, Mapping) or not all(isinstance(name, str) for name in saved):
        raise CheckpointError(f"scheduler {number} must have a state with names in the checkpoint")
    # Private attributes differ between versions of torch.
    names, saved_names = ({name for name in each if name[:1] != "_"} - {"verbose"} for each in (here, saved))
    _check_kind(f"scheduler {number}", names, saved_names)
    for name in here.keys() & saved.keys():
        fits = OWN_STATE.get(name) or functools.partial(_same_kind, here[name], as_long=name in LISTS)
        if not fits(saved[name]):
            raise CheckpointError(
                f"scheduler {number}: {name} is {here[name]!r:.60} here and {saved[name]!r:.60} in the checkpoint, which "
                "has another type"
            )
    _try_scheduler(number, scheduler, saved)


def _try_scheduler(number: int, scheduler: Any, saved: Any) -> None:
    """Raise CheckpointError if one of torch's schedulers cannot step with the saved state."""
    if not _is_torchs(scheduler, "torch.optim.lr_scheduler") or not hasattr(scheduler, "optimizer"):
        return
    with _quiet():
        try:
            _scheduler_step(_scheduler_twin(scheduler))
        except Exception as error:  # it cannot be copied, or was at its last step
            logger.debug("%s cannot be tried on a copy: %r", type(scheduler).__name__, error)
            return
        try:
            twin = _scheduler_twin(scheduler)
            twin.load_state_dict(copy.deepcopy(saved))
            _scheduler_step(twin)
        except (ValueError, RuntimeError):
            return  # the state of its last step, after which no other is possible, can be loaded
        except Exception as error:
            raise CheckpointError(
                f"scheduler {number}: a step with the checkpoint's state fails ({type(error).__name__}: {error})"
            ) from error


def _scheduler_twin(scheduler: Any) -> Any:
    """Return a copy of the scheduler with a copy of its optimizer's options."""
    optimizer = scheduler.optimizer
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return copy.deepcopy(scheduler, {id(optimizer): foreign.optimizer_stand_in(copy.deepcopy(groups))})


def _scheduler_step(twin: Any) -> None:
    if isinstance(twin, torch.optim.lr_scheduler.ReduceLROnPlateau):
        twin.step(1.0)
    else:
        twin.step()
    for group in twin.optimizer.param_groups:
        if not isinstance(group["lr"], torch.Tensor):
            float(group["lr"] + 0.0)


def check_scaler(mine: Mapping[str, Any], saved: Any) -> None:
    """Raise CheckpointError if the saved state does not fit the gradient scaler, which has the state `mine`."""
    if not isinstance(saved, Mapping):
        raise CheckpointError("the gradient scaler must have a state with names in the checkpoint")
    for name, value in mine.items():
        if _is_number(value):
            given = saved.get(name)
            same_type = isinstance(given, int) or not isinstance(value, int)
            if not _is_number(given) or not same_type or not math.isfinite(given) or given < 0:
                raise CheckpointError(f"the gradient scaler's {name} is {given!r:.60} in the checkpoint")
        elif not _same_kind(value, saved.get(name)):
            raise CheckpointError(f"the gradient scaler's {name} has another type in the checkpoint")


# -- both -------------------------------------------------------------------------------------------


def _is_torchs(thing: Any, package: str) -> bool:
    """Return whether the class of this object is one of torch's own, and not a user's subclass."""
    module = type(thing).__module__
    return module == package or module.startswith(package + ".")


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _same_kind(mine: Any, saved: Any, *, as_long: bool = True) -> bool:
    """Return whether one plain value can replace the other: a number a number, a list a list."""
    if mine is None or saved is None:
        return mine is None or not (_is_number(mine) or isinstance(mine, (tuple, list, str)))
    if _is_number(mine):
        return _is_number(saved)
    if isinstance(mine, bool):
        return isinstance(saved, bool)
    if isinstance(mine, (tuple, list)):
        fits = isinstance(saved, (tuple, list)) and (len(mine) == len(saved) or not as_long)
        return fits and all(_same_kind(here, there) for here, there in zip(mine, saved, strict=False))
    if isinstance(mine, Mapping):
        return isinstance(saved, Mapping)
    if isinstance(mine, torch.Tensor) and mine.dim() == 0 and _is_number(saved):
        return True  # a learning rate that is a tensor here
    return isinstance(saved, type(mine))


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
