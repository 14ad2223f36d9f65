"""Calls a user's override with as many of the documented arguments as it takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["call_with"]


def call_with(function: Callable[..., Any], *positional: Any, **optional: Any) -> Any:
    """`positional` are always passed; of `optional`, those whose names the function knows."""
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return function(*positional, **optional)
    return function(*positional, **{name: value for name, value in optional.items() if name in parameters})
