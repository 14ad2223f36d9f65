"""Checks of the arguments that both trainers take. Driver."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from raysgd.config import WorkerResources, check_trainer
from raysgd.errors import ConfigError

__all__ = ["check_common", "check_num_workers", "needs_ray", "refuse_unknown"]


def refuse_unknown(trainer: type, unknown: Mapping[str, Any], removed: Mapping[str, str] | None = None) -> None:
    """Raise an error for arguments that the trainer does not have. `removed` has a hint for each that older versions
    had."""
    for name, value in unknown.items():
        if removed is not None and name in removed:
            if value is None:
                continue
            raise DeprecationWarning(
                f"{trainer.__name__} takes no {name} any more: {removed[name]}. See docs/migrating.md"
            )
        known = [each for each in inspect.signature(trainer).parameters if each != "unknown"]
        close = difflib.get_close_matches(name, known, n=1)
        hint = f": did you mean {close[0]!r}?" if close else f". Its arguments are {', '.join(known)}"
        raise TypeError(f"{trainer.__name__} takes no argument {name!r}{hint}")


def check_common(operator_cls: Any, base: type, num_workers: Any, hook: Any, timeout_s: Any, elastic: Any) -> None:
    """Raise ConfigError for arguments that both trainers have."""
    if not isinstance(operator_cls, type) or not issubclass(operator_cls, base):
        hint = " Pass the class itself, not an instance." if isinstance(operator_cls, base) else ""
        raise ConfigError(
            f"training_operator_cls must be a subclass of raysgd's {base.__name__} ({base.__module__}), "
            f"got {operator_cls!r}.{hint}"
        )
    check_num_workers(num_workers)
    check_trainer(hook, timeout_s, elastic)
    if elastic is not None and elastic.min_workers > num_workers:
        raise ConfigError(
            f"elastic.min_workers is {elastic.min_workers}, but num_workers is {num_workers}: it can be that at most"
        )


def check_num_workers(num_workers: Any, name: str = "num_workers") -> None:
    if not isinstance(num_workers, int) or isinstance(num_workers, bool) or num_workers < 1:
        raise ConfigError(f"{name} must be a whole number of at least 1, got {num_workers!r}")


def needs_ray(use_ray: bool | None, num_workers: int, resources: WorkerResources, *, elsewhere: bool = False) -> bool:
    """Return whether workers are Ray actors. One worker runs in this process, unless the user asks for Ray, or it needs
    resources that only the cluster may have (`elsewhere`: its GPU is not in this machine)."""
    if num_workers > 1 or resources.custom or elsewhere:
        if use_ray is False:
            raise ConfigError("use_ray=False is possible with num_workers=1 and without custom resources only")
        return True
    return bool(use_ray)
