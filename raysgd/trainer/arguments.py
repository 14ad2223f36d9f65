"""Checks of the arguments that both trainers take. Driver."""

from __future__ import annotations

import inspect
import io
import sys
import warnings
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from raysgd.config import ElasticConfig, WorkerResources, above_0, at_least, is_real, object_of
from raysgd.constants import BATCH_SIZE
from raysgd.errors import ConfigError, close_to, shown
from raysgd.version import page

# Arguments of the trainers of training functions, whose classes have the same names.
OF_FUNCTIONS = ("train_loop_per_worker", "train_loop_config", "scaling_config", "run_config", "datasets")


def refuse_unknown(
    trainer: type,
    unknown: Mapping[str, Any],
    groups: Mapping[str, type],
    removed: Mapping[str, str] = MappingProxyType({}),
    without_effect: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise an error for names that are not arguments of the trainer.

    `groups` has the trainer's arguments that are settings objects, with their classes: their fields
    are not arguments of the trainer. `removed` has a hint for each argument that older versions
    had, and `without_effect` for each of them that only gets a warning.
    """
    owners = {each.name: (group, kind.__name__) for group, kind in groups.items() for each in fields(kind)}
    known = [each for each in inspect.signature(trainer).parameters if each != "unknown"]
    for name, value in unknown.items():
        if name in known:
            continue
        if name in without_effect:
            if value:
                warnings.warn(f"{name} has no effect: {without_effect[name]}", DeprecationWarning, stacklevel=4)
            continue
        if name in removed:
            if value is None:
                continue
            raise DeprecationWarning(
                f"{trainer.__name__} takes no {name} any more: {removed[name]}. See {page('migrating')}"
            )
        if name in OF_FUNCTIONS:
            raise TypeError(
                f"{trainer.__name__} takes no argument {name!r}: it trains an operator class, training_operator_cls=.... The trainers "
                "of raysgd.train run a training function, and take it"
            )
        if name in owners:
            group, kind = owners[name]
            raise ConfigError(f"{name} is a field of {kind}: pass {group}={kind}({name}=...)")
        close = close_to(name, [*known, *owners])
        if close in owners:
            group, kind = owners[close]
            hint = f": did you mean {close!r}, a field of {kind}? Pass {group}={kind}({close}=...)"
        else:
            hint = f": did you mean {close!r}?" if close else f". Its arguments are {', '.join(known)}"
        raise TypeError(f"{trainer.__name__} takes no argument {name!r}{hint}")


def check_common(
    operator_cls: Any, base: type, num_workers: Any, hook: Any, timeout_s: Any, elastic: Any, config: Any
) -> tuple[ElasticConfig, dict[str, Any], bool]:
    """Raise ConfigError for wrong values of arguments that both trainers have. Return `elastic`, or
    the default, a copy of the config, and whether there can be several workers."""
    if not isinstance(operator_cls, type) or not issubclass(operator_cls, base):
        hint = " Pass the class itself, not an instance." if isinstance(operator_cls, base) else ""
        hint = " For a training function, use raysgd.train.TorchTrainer." if inspect.isfunction(operator_cls) else hint
        raise ConfigError(
            f"training_operator_cls must be a subclass of raysgd's {base.__name__} ({base.__module__}), "
            f"got {operator_cls!r}.{hint}"
        )
    _check_methods(operator_cls, base)
    at_least("num_workers", num_workers, 1, whole=True)
    check_hook(hook)
    above_0("timeout_s", timeout_s)
    object_of(ElasticConfig, "elastic", elastic)
    checked = ElasticConfig() if elastic is None else elastic
    if checked.min_workers > num_workers:
        raise ConfigError(
            f"elastic.min_workers is {checked.min_workers}, but num_workers is {num_workers}: pass at most num_workers"
        )
    copied = _copy_config(config)
    total = copied.get(BATCH_SIZE, num_workers)
    if not isinstance(total, int) or isinstance(total, bool) or total < num_workers:
        raise ConfigError(
            f"config[{BATCH_SIZE!r}] is the batch of all workers together: a whole number of at least num_workers "
            f"({num_workers}), got {total!r}"
        )
    return checked, copied, num_workers > 1


# What raysgd calls of an operator, with the names of the arguments that it passes.
METHODS = {
    "setup": ("config",),
    "train_batch": ("batch", "batch_info"),
    "validate_batch": ("batch", "batch_info"),
    "state_dict": (),
    "load_state_dict": ("state_dict",),
    "resized": ("old_world_size", "new_world_size"),
    "on_step": ("info",),  # of torch's operators
    "on_preemption_notice": ("deadline_s",),
}


def _check_methods(operator_cls: type, base: type) -> None:
    """Raise ConfigError if an operator's own methods do not take what raysgd passes. Warn of a
    `state_dict` that nothing restores."""
    name = operator_cls.__name__
    for method, arguments in METHODS.items():
        if not hasattr(base, method):
            continue
        definition = inspect.getattr_static(operator_cls, method)
        if not inspect.isfunction(definition) or definition is inspect.getattr_static(base, method):
            continue
        named = {
            each: None
            for each in arguments
            if each == "batch_info" and each in inspect.signature(definition).parameters
        }
        try:
            inspect.signature(definition).bind(None, *(each for each in arguments if each not in named), **named)
        except TypeError:
            expected = ", ".join(("self", *arguments))
            raise ConfigError(
                f"{name}.{method} must take ({expected}), got {method}{inspect.signature(definition)}: change its arguments"
            ) from None
    try:
        inspect.signature(operator_cls).bind(None, settings=None, rank_info=None)
    except TypeError:
        definition = inspect.signature(inspect.getattr_static(operator_cls, "__init__"))
        raise ConfigError(
            f"{name}.__init__ must take (self, config, *, settings, rank_info), got __init__{definition}: move its content into "
            "setup(self, config), which raysgd calls on each worker, or define __init__(self, *args, **kwargs) and call "
            "super().__init__(*args, **kwargs) in it"
        ) from None
    saves, loads = (
        getattr(operator_cls, each) is not getattr(base, each) for each in ("state_dict", "load_state_dict")
    )
    if saves and not loads:
        warnings.warn(
            f"{name}.state_dict returns what is saved, and nothing restores it: define load_state_dict(self, state_dict), too",
            stacklevel=5,
        )


def check_hook(hook: Any) -> None:
    if hook is None:
        return
    try:
        inspect.signature(hook).bind()
    except ValueError:
        return  # a function in C may have no signature
    except TypeError:
        raise ConfigError(f"initialization_hook must be a function without arguments, got {hook!r}") from None


def check_call(num_steps: Any, max_retries: Any, info: Any) -> None:
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


def _copy_config(config: Any) -> dict[str, Any]:
    """Copy the config. Raise ConfigError if it is not a dict, or has an open file."""
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(f"config must be a dict, got {config!r}")
    copied = dict(config or {})
    for key, value in copied.items():
        if isinstance(value, io.TextIOWrapper) and value not in (sys.stdin, sys.stdout, sys.stderr):
            raise ConfigError(
                f"config[{key!r}] is an open file, {shown(value)}, and each worker would read a copy of its own from memory: "
                "pass its path, and open it in setup"
            )
    return copied


def needs_ray(
    use_ray: bool | None, is_distributed: bool, resources: WorkerResources, *, elsewhere: bool = False
) -> bool:
    """Whether workers are Ray actors. One worker runs in this process, unless the user asks for
    Ray, or it needs resources that only the cluster may have (`elsewhere`: its GPU is not in this
    machine, or it outlives this process)."""
    if is_distributed or resources.custom or elsewhere:
        if use_ray is False:
            raise ConfigError(
                "use_ray=False is possible with num_workers=1 only, without name= and custom resources, and with a GPU only if "
                "this machine has one"
            )
        return True
    return bool(use_ray)
