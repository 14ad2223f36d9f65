"""Try a saved optimizer or scheduler state on a copy without weights: load it, and take a step with it. Worker.

Only torch's own classes are tried, because a step of another class can have unknown side effects.
"""

from __future__ import annotations

import copy
import inspect
import logging
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from raysgd.errors import CheckpointError
from raysgd.torch.checkpoint.states import completed

__all__ = ["is_torchs", "try_optimizer", "try_scheduler"]

logger = logging.getLogger(__name__)

# Options that choose how a step is computed, but do not change its result. A copy without weights has its own.
IMPLEMENTATION = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}


def is_torchs(thing: Any, package: str) -> bool:
    """Return whether the class of this object is one of torch's own, and not a user's subclass."""
    module = type(thing).__module__
    return module == package or module.startswith(package + ".")


def try_optimizer(number: int, optimizer: Any, saved: dict[str, Any]) -> bool:
    """Return whether the shapes of the state could be compared. Raise CheckpointError if they differ from those of this
    optimizer, or if a step with the saved options and state fails."""
    if not is_torchs(optimizer, "torch.optim"):
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


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return f"of type {type(value).__name__}"


def try_scheduler(number: int, scheduler: Any, saved: Any) -> None:
    """Raise CheckpointError if one of torch's schedulers cannot step with the saved state."""
    if not is_torchs(scheduler, "torch.optim.lr_scheduler") or not hasattr(scheduler, "optimizer"):
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

    def step() -> None:
        """Schedulers check whether this was called."""

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    substitute = types.SimpleNamespace(param_groups=copy.deepcopy(groups), step=step, _opt_called=True, _step_count=1)
    return copy.deepcopy(scheduler, {id(optimizer): substitute})


def _scheduler_step(twin: Any) -> None:
    if isinstance(twin, torch.optim.lr_scheduler.ReduceLROnPlateau):
        twin.step(1.0)
    else:
        twin.step()
    for group in twin.optimizer.param_groups:
        if not isinstance(group["lr"], torch.Tensor):
            float(group["lr"] + 0.0)


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
