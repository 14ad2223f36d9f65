"""Learning rates that follow the number of workers: `ElasticConfig(lr=...)`. Worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from raysgd.errors import ConfigError
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
