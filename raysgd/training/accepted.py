"""Which of the documented arguments a user's override accepts. Worker."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["accepted_arguments"]


def accepted_arguments(
    function: Callable[..., Any], *positional: Any, **optional: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments to call the function with: all of `positional`; of `optional`,
    those whose names it knows, and the first ones also for required parameters of another name (`_` for an `info` that
    it does not use)."""
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return positional, optional
    optional = dict(optional)
    for name, each in list(parameters.items())[len(positional) :]:
        by_place = each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) and each.default is each.empty
        if not by_place or not optional:
            break
        positional += (optional.pop(name if name in optional else next(iter(optional))),)
    return positional, {name: value for name, value in optional.items() if name in parameters}
