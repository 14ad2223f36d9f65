"""Checks of the arguments that both trainers take. Driver."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from raysgd.config import ElasticConfig, WorkerResources, at_least, is_real
from raysgd.constants import BATCH_SIZE
from raysgd.errors import ConfigError

__all__ = ["check_call", "check_common", "check_config", "needs_ray", "refuse_unknown"]


def refuse_unknown(
    trainer: type, unknown: Mapping[str, Any], groups: Mapping[str, type], removed: Mapping[str, str] | None = None
) -> None:
    """Raise an error for names that are not arguments of the trainer.

    `groups` has the trainer's arguments that are settings objects, with their classes: their fields are not arguments of
    the trainer. `removed` has a hint for each argument that older versions had.
    """
    owners = {each.name: (group, kind.__name__) for group, kind in groups.items() for each in fields(kind)}
    known = [each for each in inspect.signature(trainer).parameters if each != "unknown"]
    for name, value in unknown.items():
        if name in known:
            continue
        if removed is not None and name in removed:
            if value is None:
                continue
            raise DeprecationWarning(
                f"{trainer.__name__} takes no {name} any more: {removed[name]}. See docs/migrating.md"
            )
        if name in owners:
            group, kind = owners[name]
            raise ConfigError(f"{name} is a field of {kind}: pass {group}={kind}({name}=...)")
        close = next(iter(difflib.get_close_matches(name, [*known, *owners], n=1)), None)
        if close in owners:
            group, kind = owners[close]
            hint = f": did you mean {close!r}, a field of {kind}? Pass {group}={kind}({close}=...)"
        else:
            hint = f": did you mean {close!r}?" if close else f". Its arguments are {', '.join(known)}"
        raise TypeError(f"{trainer.__name__} takes no argument {name!r}{hint}")


def check_common(operator_cls: Any, base: type, num_workers: Any, hook: Any, timeout_s: Any, elastic: Any) -> None:
    """Raise ConfigError for wrong values of arguments that both trainers have."""
    if not isinstance(operator_cls, type) or not issubclass(operator_cls, base):
        hint = " Pass the class itself, not an instance." if isinstance(operator_cls, base) else ""
        raise ConfigError(
            f"training_operator_cls must be a subclass of raysgd's {base.__name__} ({base.__module__}), "
            f"got {operator_cls!r}.{hint}"
        )
    at_least("num_workers", num_workers, 1, whole=True)
    if hook is not None and not callable(hook):
        raise ConfigError(f"initialization_hook must be a function without arguments, got {hook!r}")
    if not is_real(timeout_s) or timeout_s <= 0:
        raise ConfigError(f"timeout_s must be a number of seconds above 0, got {timeout_s!r}")
    if elastic is not None and not isinstance(elastic, ElasticConfig):
        raise ConfigError(f"elastic must be a raysgd.ElasticConfig, got {elastic!r}")
    if elastic is not None and elastic.min_workers > num_workers:
        raise ConfigError(
            f"elastic.min_workers is {elastic.min_workers}, but num_workers is {num_workers}: pass at most num_workers"
        )


def check_call(num_steps: Any, max_retries: Any, info: Any) -> None:
    """Raise ConfigError for wrong arguments of `train` and `validate`."""
    if num_steps is not None and not (is_real(num_steps) and isinstance(num_steps, int) and num_steps >= 0):
        raise ConfigError(
            f"num_steps must be a whole number of at least 0, or None for the whole epoch, got {num_steps!r}"
        )
    if not isinstance(max_retries, int) or max_retries < -1:
        raise ConfigError(
            "max_retries must be a whole number: how many worker failures this call may have, -1 for any number; got "
            f"{max_retries!r}"
        )
    if info is not None and not isinstance(info, Mapping):
        raise ConfigError(f"info must be a dict, got {info!r}")


def check_config(config: Any, num_workers: int) -> dict[str, Any]:
    """Return a copy of the config. Raise ConfigError if it is not a dict, or if its batch size is not possible."""
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(f"config must be a dict, got {config!r}")
    copied = dict(config or {})
    total = copied.get(BATCH_SIZE, num_workers)
    if not isinstance(total, int) or isinstance(total, bool) or total < num_workers:
        raise ConfigError(
            f"config[{BATCH_SIZE!r}] is the batch of all workers together: a whole number of at least num_workers "
            f"({num_workers}), got {total!r}"
        )
    return copied


def needs_ray(use_ray: bool | None, num_workers: int, resources: WorkerResources, *, elsewhere: bool = False) -> bool:
    """Return whether workers are Ray actors. One worker runs in this process, unless the user asks for Ray, or it needs
    resources that only the cluster may have (`elsewhere`: its GPU is not in this machine)."""
    if num_workers > 1 or resources.custom or elsewhere:
        if use_ray is False:
            raise ConfigError(
                "use_ray=False is possible with num_workers=1 only, without custom resources, and with a GPU only if this "
                "machine has one"
            )
        return True
    return bool(use_ray)
