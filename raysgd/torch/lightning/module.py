"""Create a LightningModule from its class and config; refuse what is not supported. Worker."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from torch import nn

from raysgd.config import Exclusions, refuse
from raysgd.errors import ConfigError
from raysgd.torch.foreign import configured_optimizers
from raysgd.torch.packages import check_version
from raysgd.torch.settings import TorchSettings

PACKAGES = ("lightning", "pytorch_lightning")
INSTEAD = "use Lightning's own Trainer in a training function"
# raysgd does not call these, so a module that overrides one of them would not do what its author expects.
UNSUPPORTED = (
    "backward",
    "clip_gradients",
    "configure_callbacks",
    "configure_gradient_clipping",
    "configure_sharded_model",
    "log",
    "lr_scheduler_step",
    "on_after_batch_transfer",
    "on_before_batch_transfer",
    "on_fit_end",
    "on_train_end",
    "on_validation_model_eval",
    "on_validation_model_train",
    "on_validation_model_zero_grad",
    "optimizer_step",
    "optimizer_zero_grad",
    "teardown",
    "training_epoch_end",
    "training_step_end",
    "transfer_batch_to_device",
    "validation_epoch_end",
    "validation_step_end",
)

NOT_WITH_LIGHTNING: Exclusions = (
    ({"precision": ("apex",)}, "use 'fp16' or 'bf16'"),
    ({"parallel": ("fsdp",)}, "use 'ddp'"),
    ({"accumulate": (1).__lt__}, "use larger batches"),
    ({"clip_norm": bool, "clip_value": bool}, "pass one of the two"),
)


def lightning_base(module_cls: Any) -> type:
    """Find the LightningModule class that this one inherits from, of either package."""
    if not isinstance(module_cls, type):
        text = (
            f"an object of type {type(module_cls).__name__}" if isinstance(module_cls, nn.Module) else repr(module_cls)
        )
        raise ConfigError(
            f"from_ptl takes a LightningModule class, because each worker creates its own object; got {text}"
        )
    for each in module_cls.__mro__:
        if each.__name__ == "LightningModule" and each.__module__.split(".")[0] in PACKAGES:
            break
    else:
        raise ConfigError(
            f"from_ptl takes a subclass of LightningModule, got {module_cls.__name__}. To install Lightning: "
            "pip install 'raysgd[lightning]'"
        )
    check_version(each.__module__.split(".")[0], extra="lightning")
    return each


def construct(module_cls: type, config: Mapping[str, Any]) -> Any:
    """Make a module. If its `__init__` has a parameter `config`, it gets the complete config, and
    otherwise the keys that are its parameters."""
    parameters = list(inspect.signature(module_cls).parameters.values())
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    arguments = {"config": config} if "config" in names else {name: config[name] for name in names if name in config}
    needed = [each.name for each in parameters if each.default is each.empty and each.name in names]
    missing = [name for name in needed if name not in arguments]
    if missing:
        raise ConfigError(
            f"{module_cls.__name__}.__init__ needs {missing}, and the trainer's config has only {sorted(config)}: add them to the "
            "config, or give __init__ a parameter `config`"
        )
    return module_cls(**arguments)


def overrides(module: Any, base: type, hook: str) -> bool:
    """Whether the module overrides this hook."""
    method = getattr(type(module), hook, None)
    return method is not None and method is not getattr(base, hook, None)


def refuse_unsupported(module: Any, base: type, settings: TorchSettings) -> None:
    name = type(module).__name__
    for needed in ("training_step", "configure_optimizers"):
        if not overrides(module, base, needed):
            raise ConfigError(f"{name} has no {needed}, and raysgd cannot train it without one: define it")
    hooks = [hook for hook in UNSUPPORTED if overrides(module, base, hook)]
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        hooks.append("training_step(dataloader_iter)")
    if not module.automatic_optimization:
        hooks.append("automatic_optimization = False")
    if hooks:
        raise ConfigError(f"{name} has {', '.join(hooks)}, which from_ptl does not support: {INSTEAD}")
    options = vars(settings.options) | {"from_ptl": name}
    refuse([({"from_ptl": bool, **values}, why) for values, why in NOT_WITH_LIGHTNING], options)


def read_configuration(module: Any, base: type) -> tuple[list[Any], list[Any]]:
    """Read the optimizer and the `LRSchedulerConfig` of each scheduler that the module configures,
    as Lightning reads them."""
    core = import_module(f"{base.__module__.rsplit('.core', 1)[0]}.core.optimizer")
    name, configured = f"{type(module).__name__}.configure_optimizers", module.configure_optimizers()
    try:
        optimizers, schedules = configured_optimizers(core, module, configured)
    except Exception as error:
        raise ConfigError(
            f"{name} returned {configured!r}, which from_ptl does not support ({error}): {INSTEAD}"
        ) from error
    kinds = [type(each).__name__ for each in optimizers if _needs_closure(each.step)]
    kinds += [type(each.scheduler).__name__ for each in schedules if each.reduce_on_plateau]
    if kinds:
        raise ConfigError(f"{name} has {', '.join(kinds)}, which from_ptl does not support: {INSTEAD}")
    for each in schedules:
        if each.frequency < 1:
            raise ConfigError(f"{type(each.scheduler).__name__} has frequency={each.frequency!r}: use 1 or more")
    return optimizers, schedules


def _needs_closure(step: Callable[..., Any]) -> bool:
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def takes_index(step: Callable[..., Any]) -> bool:
    """Whether a step takes (batch, batch_idx), and not only (batch)."""
    parameters = inspect.signature(step).parameters.values()
    places = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return len(places) > 1 or any(each.kind is each.VAR_POSITIONAL for each in parameters)


def one_loader(value: Any, name: str) -> Any:
    """Find the loader in what a module returned or the user passed: exactly one."""
    several = value if isinstance(value, (list, tuple)) and value else [value]
    of_several = isinstance(value, dict) or hasattr(value, "flattened")
    if (
        hasattr(value, "prepare_data")
        or of_several
        or (len(several) > 1 and all(hasattr(each, "dataset") for each in several))
    ):
        raise ConfigError(f"{name} is a {type(value).__name__}, and from_ptl takes one loader: {INSTEAD}")
    return several[0] if hasattr(several[0], "dataset") else value
