"""Find hyperparameters of optimizers, name those of a script that a loaded state replaces, and
change them there: for Tune's population-based training. Worker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from raysgd.replica.internals import Internals, internals_of
from raysgd.torch.foreign import nested_schedulers

IGNORED = (
    "the loaded state has different settings of optimizers than this script: %s. Training continues with the loaded ones. "
    "To use those of this script, change them with trainer.apply_all_operators(...), or start a new run"
)
LEFT_OUT = ("params", "lr", "capturable")  # the rate is the initial one; a load does not set the last
LISTED = 5
MOST_ENTRIES = 64  # of a setting that is a list


@dataclass(frozen=True)
class Option:
    """A hyperparameter of one optimizer's parameter group, such as its "lr"."""

    optimizer: int
    group: int
    name: str


def made_with(registered: Any) -> dict[str, Any]:
    """Collect the settings that `setup` gave the optimizers, as JSON has them."""
    settings: dict[str, Any] = {}
    for number, optimizer in enumerate(registered.optimizers):
        groups = getattr(optimizer, "param_groups", ())
        for place, group in enumerate(groups):
            of = f"group {place} of " * (len(groups) > 1) + f"optimizers[{number}] ({type(optimizer).__name__})"
            settings |= {f"{name} of {of}": value for name, value in group.items() if name not in LEFT_OUT}
            settings[f"lr of {of}"] = settings.pop(f"initial_lr of {of}", group.get("lr"))
    return {name: value for name, each in settings.items() if (value := plain(each)) is not None}


def plain(value: Any) -> Any:
    """A setting as JSON has it; None for objects, whose text differs between processes."""
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.numel() == 1 else None
    if value is None or isinstance(value, (bool, str)):
        return "None" if value is None else value
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, (list, tuple)):
        every = [plain(each) for each in value]
        return None if None in every or len(every) > MOST_ENTRIES else every
    return None


def warn_of_ignored(internals: Internals, here: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
    """Warn if the script that made a loaded state has given its optimizers other settings than this
    one."""
    differ = [name for name, value in here.items() if name in loaded and loaded[name] != value]
    if differ:
        more = [f"and {len(differ) - LISTED} more"] if len(differ) > LISTED else []
        named = [f"{name} is {_shown(loaded[name])} (here: {_shown(here[name])})" for name in differ[:LISTED]]
        internals.warn_once(IGNORED, ", ".join([*named, *more]))


def options(operator: Any, values: Mapping[str, float]) -> list[Option]:
    """Find the hyperparameters of the optimizers that `setup` gave these values, by name. They will
    be changed in a loaded state, so no warning says that it ignores them."""
    internals = internals_of(operator)
    internals.leave_out_warning(IGNORED)
    return [
        Option(number, place, name)
        for number, optimizer in enumerate(internals.registered.optimizers)
        for place, group in enumerate(optimizer.param_groups)
        for name, value in values.items()
        if name in group and group[name] == value
    ]


def retune(operator: Any, chosen: Iterable[Option], changed: Mapping[str, tuple[float, float]]) -> None:
    """Replace old values by new ones: `changed` has both, by name. Where a scheduler has changed an
    old value since `setup`, scale the new one by the same factor."""
    registered = internals_of(operator).registered
    for option in chosen:
        old, new = changed[option.name]
        optimizer = registered.optimizers[option.optimizer]
        group = optimizer.param_groups[option.group]
        group[option.name] = _scaled(group[option.name], old, new)
        if option.name != "lr":
            continue
        if "initial_lr" in group:
            group["initial_lr"] = _scaled(group["initial_lr"], old, new)
        for scheduler in with_nested(registered.schedulers):
            rates = getattr(scheduler, "base_lrs", None)
            if rates is not None and scheduler.optimizer is optimizer:
                rates[option.group] = _scaled(rates[option.group], old, new)


def _scaled(value: Any, old: float, new: float) -> Any:
    return value * (new / old) if old else new


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def with_nested(schedulers: Iterable[Any]) -> Iterator[Any]:
    """Yield the schedulers, and those inside of others (SequentialLR, ChainedScheduler)."""
    for scheduler in schedulers:
        yield scheduler
        yield from with_nested(nested_schedulers(scheduler))
