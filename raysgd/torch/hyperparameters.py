"""Change hyperparameters of optimizers: learning rates that follow the number of workers
(`ElasticConfig(lr=...)`), and what Tune's population-based training changes in a loaded state.
Worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raysgd.errors import ConfigError
from raysgd.torch.foreign import nested_schedulers
from raysgd.training.step import Policy


def scaling(rule: str, workers: int, usual: int) -> float:
    """Return the factor of the learning rates for this number of workers, which is 1 for the usual
    one."""
    return float((workers / usual) ** (0.5 if rule == "sqrt" else 1.0))


class Rates(Policy):
    """Multiplies the learning rates by `factor()` for the duration of each step. Between steps,
    groups hold the unscaled rates: so schedulers and checkpoints know nothing of the factor, and
    nothing is left of it when the number of workers is the usual one again."""

    def __init__(self, factor: Callable[[], float]) -> None:
        self._factor = factor
        self._own: dict[int, list[tuple[dict[str, Any], Any]]] = {}  # the unscaled rates of an optimizer that steps

    def watch(self, optimizers: Sequence[Any]) -> None:
        for optimizer in optimizers:
            if not hasattr(optimizer, "register_step_post_hook"):
                raise ConfigError(
                    f"ElasticConfig(lr=...) scales the learning rates of torch optimizers, got a {type(optimizer).__name__}, which has "
                    "no register_step_post_hook: leave lr out, and scale the rate in resized(old_world_size, new_world_size)"
                )
            optimizer.register_step_pre_hook(self._scale)
            optimizer.register_step_post_hook(self._restore)

    def _scale(self, optimizer: Any, *_: Any) -> None:
        self._restore(optimizer)
        if (now := self._factor()) != 1.0:
            own = self._own[id(optimizer)] = [(each, each["lr"]) for each in optimizer.param_groups if "lr" in each]
            for group, rate in own:
                group["lr"] = rate * now

    def _restore(self, optimizer: Any, *_: Any) -> None:
        for group, rate in self._own.pop(id(optimizer), ()):
            group["lr"] = rate

    def rest(self) -> None:
        """Restore the rates of a step that has raised an error."""
        for rates in self._own.values():
            for group, rate in rates:
                group["lr"] = rate
        self._own.clear()


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
