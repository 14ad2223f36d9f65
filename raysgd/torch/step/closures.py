"""Act when the gradients of a step are there, also if a closure computes them during the step.
Worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def closure_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """Find the closure that a step got, if it got one. The first argument is the optimizer."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return closure if callable(closure) else None


def after_gradients(args: tuple[Any, ...], kwargs: dict[str, Any], check: Callable[[], None]) -> Any:
    """In a hook before a step: call `check` when the step's gradients are there, and return what
    the hook returns. A closure computes them during the step, and may be called several times."""
    closure = closure_in(args, kwargs)
    if closure is None:
        return check()

    def checked() -> Any:
        loss = closure()
        check()
        return loss

    return args[:1], {**kwargs, "closure": checked}
