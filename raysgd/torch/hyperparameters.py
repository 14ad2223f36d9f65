"""Find hyperparameters of optimizers, and change them in a loaded state: for Tune's
population-based training. Worker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from raysgd.torch.foreign import nested_schedulers


@dataclass(frozen=True)
class Option:
    """A hyperparameter of one optimizer's parameter group, such as its "lr"."""

    optimizer: int
    group: int
    name: str


def options(operator: Any, values: Mapping[str, float]) -> list[Option]:
    """Return the hyperparameters of the optimizers that `setup` gave these values, by name."""
    return [
        Option(number, place, name)
        for number, optimizer in enumerate(operator._parts.optimizers)
        for place, group in enumerate(optimizer.param_groups)
        for name, value in values.items()
        if name in group and group[name] == value
    ]


def retune(operator: Any, chosen: Iterable[Option], changed: Mapping[str, tuple[float, float]]) -> None:
    """Replace old values by new ones: `changed` has both, by name. Where a scheduler has changed an
    old value since `setup`, scale the new one by the same factor."""
    parts = operator._parts
    for option in chosen:
        old, new = changed[option.name]
        optimizer = parts.optimizers[option.optimizer]
        group = optimizer.param_groups[option.group]
        group[option.name] = _scaled(group[option.name], old, new)
        if option.name != "lr":
            continue
        if "initial_lr" in group:
            group["initial_lr"] = _scaled(group["initial_lr"], old, new)
        for scheduler in _all(parts.schedulers):
            rates = getattr(scheduler, "base_lrs", None)
            if rates is not None and scheduler.optimizer is optimizer:
                rates[option.group] = _scaled(rates[option.group], old, new)


def _scaled(value: Any, old: float, new: float) -> Any:
    return value * (new / old) if old else new


def _all(schedulers: Iterable[Any]) -> Iterator[Any]:
    """Return the schedulers, and those inside of others (SequentialLR, ChainedScheduler)."""
    for scheduler in schedulers:
        yield scheduler
        yield from _all(nested_schedulers(scheduler))
