"""The calls of a trainer: which data they read, and which arguments user code gets in them. Worker.

With several loaders that have names, each has a phase of its own, such as "validation.NAME".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Literal, cast

Phase = Literal["train", "validation", "test"]
# The phases of calls that read data; all other calls are made between those of training.
PHASES: dict[str, Phase] = {"validate": "validation", "test": "test"}
CALLS: dict[Phase, str] = {"train": "train", "validation": "validate", "test": "test"}


def split(phase: str) -> tuple[Phase, str]:
    """Find what a phase evaluates, and the name of its loader, if that has one."""
    kind, _, name = phase.partition(".")
    return cast(Phase, kind), name


def phases_of(kind: Phase, data: Any) -> list[str]:
    """The phases of a call that reads this data: one, or one for each loader that has a name."""
    return [f"{kind}.{name}" for name in data] if isinstance(data, Mapping) else [kind]


def choose_arguments(
    function: Callable[..., Any], *positional: Any, **optional: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Choose the positional and keyword arguments that a user's function accepts: all of
    `positional`, and those of `optional` that it has parameters for. A required parameter with
    another name, such as `_` for an `info` that the function does not use, receives the next of
    them."""
    bound = getattr(function, "__self__", None) is not None and hasattr(function, "__func__")
    parameters = _parameters(function.__func__)[1:] if bound else _parameters(function)  # type: ignore[attr-defined]
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return positional, optional
    optional = dict(optional)
    for each in parameters[len(positional) :]:
        name = each.name
        by_place = each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) and each.default is each.empty
        if not by_place or not optional:
            break
        positional += (optional.pop(name if name in optional else next(iter(optional))),)
    names = {each.name for each in parameters}
    return positional, {name: value for name, value in optional.items() if name in names}


@lru_cache(maxsize=64)
def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def apply_operator(replica: Any, function: Callable[[Any], Any]) -> Any:
    return replica.operator._change_with(function)


def apply(replica: Any, function: Callable[[], Any]) -> Any:
    return function()


def notice_preemption(replica: Any, deadline_s: float | None) -> None:
    """Tell the operator that this machine will be stopped."""
    replica.operator.on_preemption_notice(deadline_s)
