"""Check that a checkpoint's content fits an operator before any of it is loaded. Worker.

Only loading shows whether a user's own class accepts its state (the operator, an optimizer that is
not torch's).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from raysgd.errors import CheckpointError
from raysgd.replica.steps.position import check_counters
from raysgd.torch.data.sampling import has_own_batches, is_planned
from raysgd.torch.data.stateful import marks_in
from raysgd.torch.foreign import nested_schedulers
from raysgd.torch.registered import Registered
from raysgd.torch.state import states
from raysgd.torch.step.parts.part_states import check_part_states


def check_fits(registered: Registered, state: dict[str, Any]) -> None:
    """Raise CheckpointError with the first thing that does not fit. Nothing is changed. Tensors of
    the state need no content."""
    try:
        check_counters(state)
        check_part_states(state)
        _check_parts(registered, state)
        _check_loader(registered, state)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"its content is not what save() writes, and cannot be checked ({type(error).__name__}: {error})"
        ) from error


def _check_parts(registered: Registered, state: dict[str, Any]) -> None:
    for name in ("models", "optimizers", "schedulers"):
        saved, here = len(state.get(name) or ()), len(getattr(registered, name))
        if saved != here:
            raise CheckpointError(f"the checkpoint has {saved} {name}, and this operator registers {here}")
    for number, (model, of_model) in enumerate(zip(registered.models, state["models"], strict=True)):
        _check_model(number, model.state_dict(), of_model)
    for number, (optimizer, of_optimizer) in enumerate(zip(registered.optimizers, state["optimizers"], strict=True)):
        _check_optimizer(number, optimizer, of_optimizer)
    for number, (scheduler, of_scheduler) in enumerate(
        zip(registered.schedulers, state.get("schedulers") or [], strict=True)
    ):
        _check_scheduler(f"scheduler {number}", scheduler, of_scheduler)
    if scaler := states.saved_scaler(registered, state):
        _check_names("the gradient scaler", registered.precision.state() or {}, scaler)


def _check_model(number: int, mine: dict[str, Any], saved: Any) -> None:
    missing, unknown = (sorted(map(str, each)) for each in (mine.keys() - saved.keys(), saved.keys() - mine.keys()))
    if missing or unknown:
        raise CheckpointError(
            f"model {number} does not fit the checkpoint: missing in the checkpoint {missing[:4] or 'none'}, "
            f"unknown to the model {unknown[:4] or 'none'}"
        )
    for name, value in mine.items():
        if isinstance(value, torch.Tensor):
            _check_tensor(f"model {number}: {name}", value, saved[name])


def _check_tensor(where: str, mine: torch.Tensor, saved: Any) -> None:
    if not isinstance(saved, torch.Tensor):
        raise CheckpointError(f"{where} is a tensor here and a {type(saved).__name__} in the checkpoint")
    if not is_lazy(mine) and mine.shape != saved.shape:
        raise CheckpointError(f"{where} has shape {tuple(mine.shape)} here and {tuple(saved.shape)} in the checkpoint")
    if _kind_of(mine) != _kind_of(saved):
        raise CheckpointError(
            f"{where} is a {mine.layout} tensor of {mine.dtype} here, and a {saved.layout} tensor of {saved.dtype} in the checkpoint"
        )


def _kind_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a tensor must share with one that is copied into it, but not the width."""
    return tensor.is_floating_point(), tensor.is_complex(), tensor.is_quantized, tensor.layout, tensor.is_nested


# -- the states of optimizers and schedulers ----------------------------------------------------------


def _check_optimizer(number: int, optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the saved state is that of another optimizer, or of other
    parameters. The optimizer of a user may have a state of any form."""
    kind, base = type(optimizer), torch.optim.Optimizer
    has_own_state = kind.state_dict is not base.state_dict or kind.load_state_dict is not base.load_state_dict
    ordinary = isinstance(optimizer, base) and not has_own_state
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
        _check_states(number, optimizer, saved)


def _check_kind(what: str, names: set[str], saved_names: set[str]) -> None:
    """Raise CheckpointError if each side has names that the other lacks: not only a version."""
    if names - saved_names and saved_names - names:
        raise CheckpointError(
            f"{what} is of another kind: it has {sorted(names - saved_names)[:4]} here, and "
            f"{sorted(saved_names - names)[:4]} in the checkpoint"
        )


def _check_group(number: int, mine: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Check that a group has the options of this kind of optimizer, and the same parameters, if
    their names are known. (Other versions of torch add or lack flags, which take their values from
    here.)"""
    flags = {name for name, value in mine.items() if value is None or isinstance(value, bool)}
    _check_names(f"optimizer {number}", mine.keys() - flags - {"params", "param_names"}, saved)
    names, saved_names = mine.get("param_names"), saved.get("param_names")
    if names and saved_names and list(names) != list(saved_names):
        one, other = next(each for each in zip(names, saved_names, strict=True) if each[0] != each[1])
        raise CheckpointError(
            f"optimizer {number} has its parameters in another order: {one} here is at the place of {other} in the checkpoint"
        )


def _check_names(what: str, names: Iterable[str], saved: Mapping[str, Any]) -> None:
    missing = sorted(name for name in names if name not in saved)
    if missing:
        raise CheckpointError(f"{what} is of another kind: the checkpoint lacks {missing[:4]}")


def _check_states(number: int, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Check that each parameter has its state, and compare its shapes with the parameter, or its
    state here."""
    parameters = [(each, group) for group in optimizer.param_groups for each in group["params"]]
    keys = [(each, group) for group in saved["param_groups"] for each in group["params"]]
    of_torch = type(optimizer).__module__.startswith("torch.optim")
    unknown = sorted(map(str, saved["state"].keys() - {key for key, _ in keys}))
    if unknown and of_torch:
        raise CheckpointError(f"optimizer {number} has no parameters {unknown[:4]}, whose state the checkpoint has")
    total = sum(each.numel() for each, _ in parameters)  # LBFGS has one state for all
    for (key, theirs), (parameter, mine) in zip(keys, parameters, strict=True):
        present, content = optimizer.state.get(parameter, {}), saved["state"].get(key, {})
        where = f"optimizer {number}: the state of parameter {key}"
        if of_torch and content and present and _options(mine) == _options(theirs):
            _check_names(where, (name for name, each in present.items() if isinstance(each, torch.Tensor)), content)
        for name, value in content.items():
            if isinstance(value, torch.Tensor):
                _check_shape(f"{where}: {name}", parameter, present.get(name), value, total if of_torch else -1)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group that decide what its state contains."""
    return {name: value for name, value in group.items() if name in ("momentum", "amsgrad", "centered")}


def _check_shape(where: str, parameter: torch.Tensor, mine: Any, saved: torch.Tensor, total: int) -> None:
    """Check the shape of a tensor in a parameter's state. The state of torch's optimizers has one
    value, the parameter's shape, or `total` values; of others (-1) it is unknown."""
    fits = saved.numel() in (1, total) or _is_shaped_like(saved, parameter) or total < 0
    if isinstance(mine, torch.Tensor) and mine.shape == parameter.shape:
        fits = saved.shape == mine.shape
    if not fits:
        raise CheckpointError(
            f"{where} has shape {tuple(saved.shape)} in the checkpoint, which does not fit the parameter's shape "
            f"{tuple(parameter.shape)}"
        )


def _is_shaped_like(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether it has the parameter's shape, or one reduced along dimensions (Adafactor)."""
    return value.dim() == parameter.dim() and all(
        a in (1, b) for a, b in zip(value.shape, parameter.shape, strict=True)
    )


EVEN_LISTS = {"base_lrs", "lr_lambdas", "_schedulers"}  # with a value for each parameter group or inner scheduler


def _check_scheduler(what: str, scheduler: Any, saved: Any) -> None:
    here = scheduler.state_dict()
    if not isinstance(here, Mapping):
        return
    # Private attributes differ between versions of torch.
    names, saved_names = ({name for name in each if name[:1] != "_"} - {"verbose"} for each in (here, saved.keys()))
    _check_kind(what, names, saved_names)
    if not type(scheduler).__module__.startswith("torch.optim"):
        return
    _check_names(what, {"last_epoch", *EVEN_LISTS} & here.keys(), saved)
    for name in EVEN_LISTS & here.keys():
        if len(here[name]) != len(saved[name]):
            raise CheckpointError(
                f"{what}: {name} has {len(here[name])} values here, and {len(saved[name])} in the checkpoint"
            )
    for inner, of_inner in zip(nested_schedulers(scheduler), saved.get("_schedulers", ()), strict=True):
        _check_scheduler(f"a scheduler in {what}", inner, of_inner)


# -- the train_loader's order of samples --------------------------------------------------------------


def _check_loader(registered: Registered, state: dict[str, Any]) -> None:
    """Raise CheckpointError unless the train_loader can continue the checkpoint's epoch."""
    saved = state.get("loader")
    if saved is None:
        return
    loader, order = registered.train_loader, saved.get("order")
    for each in saved.get("generators", ()):
        torch.Generator().set_state(each)
    marks_in(saved)
    position = state.get("position") or {}
    parked = position.get("parked")
    ended = position.get("ended", True) if parked is None else parked[1]
    if loader is not None and is_planned(loader) and not ended and order is not None and len(order):
        _check_order(loader, order)


def _check_order(loader: Any, order: Any) -> None:
    """Check that the samples of an epoch that has not ended are in the data set."""
    batches = isinstance(order, list) and all(isinstance(each, list) for each in order)
    if batches != has_own_batches(loader):
        raise CheckpointError(
            "it is in the middle of an epoch whose batches were chosen in another way (by a batch sampler, or by a batch "
            "size) than those of the registered train_loader"
        )
    units = [each for batch in order for each in batch] if batches else order
    if isinstance(units, list) and not all(type(each) is int for each in units):
        return  # samples with keys of another type
    if isinstance(loader.dataset, Sized):
        least, most = (units.min(), units.max()) if isinstance(units, torch.Tensor) else (min(units), max(units))
        size, first, last = len(loader.dataset), int(least), int(most)
        if first < -size or last >= size:
            raise CheckpointError(
                f"it is in the middle of an epoch with sample {last}, but the registered train_loader has {size} samples"
            )
