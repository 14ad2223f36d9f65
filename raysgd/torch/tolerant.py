"""Calls a user's override with as many of the documented arguments as it takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["call_with"]


def call_with(function: Callable[..., Any], *positional: Any, **optional: Any) -> Any:
    """`positional` are always passed; of `optional`, those whose names the function knows, and the first ones also to
    parameters that must be given and have another name (`_` for an `info` that is not used)."""
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return function(*positional, **optional)
    optional = dict(optional)
    for name, each in list(parameters.items())[len(positional) :]:
        by_place = each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) and each.default is each.empty
        if not by_place or not optional:
            break
        positional += (optional.pop(name if name in optional else next(iter(optional))),)
    return function(*positional, **{name: value for name, value in optional.items() if name in parameters})
