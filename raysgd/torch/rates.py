"""Learning rates that follow the number of workers: `ElasticConfig(lr=...)`. Worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from raysgd.errors import ConfigError


def scaling_rule(name: str | None, usual: int) -> Callable[[int], float] | None:
    """Return the function from a number of workers to the factor of the learning rates, which is 1
    for the `usual` number; None without a rule."""
    if name is None:
        return None
    exponent = 0.5 if name == "sqrt" else 1.0
    return lambda workers: float((workers / usual) ** exponent)


def scale_rates(optimizers: Sequence[Any], factor: Callable[[], float]) -> Callable[[], None]:
    """Multiply the learning rates by `factor()` for the duration of each step. Between steps,
    groups hold the unscaled rates: so schedulers and checkpoints know nothing of the factor, and
    nothing is left of it when the number of workers is the usual one again. Return a function to
    call after an error in a step, which leaves the rates scaled."""
    own: dict[int, list[tuple[dict[str, Any], Any]]] = {}

    def restore(optimizer: Any, *_: Any) -> None:
        for group, rate in own.pop(id(optimizer), ()):
            group["lr"] = rate

    def scale(optimizer: Any, *_: Any) -> None:
        restore(optimizer)
        if (now := factor()) != 1.0:
            own[id(optimizer)] = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
            for group, rate in own[id(optimizer)]:
                group["lr"] = rate * now

    for optimizer in optimizers:
        if not hasattr(optimizer, "register_step_post_hook"):
            raise ConfigError(
                f"ElasticConfig(lr=...) scales the learning rates of torch optimizers, got a {type(optimizer).__name__}, which has "
                "no register_step_post_hook: leave lr out, and scale the rate in resized(old_world_size, new_world_size)"
            )
        optimizer.register_step_pre_hook(scale)
        optimizer.register_step_post_hook(restore)

    def restore_all() -> None:
        for optimizer in optimizers:
            restore(optimizer)

    return restore_all
