"""Create a LightningModule from its class and config; refuse what is not supported. Worker."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from torch import nn

from raysgd.config import Exclusions, refuse
from raysgd.errors import ConfigError
from raysgd.torch.packages import check_version
from raysgd.torch.settings import TorchSettings

PACKAGES = ("lightning", "pytorch_lightning")
# raysgd does not call these hooks, so a module that overrides one of them would not do what its author expects.
UNSUPPORTED = (
    "configure_callbacks",
    "configure_sharded_model",
    "log",
    "on_fit_end",
    "on_train_end",
    "on_validation_model_eval",
    "on_validation_model_train",
    "on_validation_model_zero_grad",
    "teardown",
    "training_epoch_end",
    "training_step_end",
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
        given = (
            f"an object of type {type(module_cls).__name__}" if isinstance(module_cls, nn.Module) else repr(module_cls)
        )
        raise ConfigError(
            f"from_ptl takes a LightningModule class, because each worker creates its own object; got {given}"
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


def optimizers_of(base: type) -> Any:
    """Import the module `core.optimizer` of the package that the module's class comes from."""
    return import_module(f"{base.__module__.rsplit('.core', 1)[0]}.core.optimizer")


def construct(module_cls: type, config: Mapping[str, Any]) -> Any:
    """Make a module. If its `__init__` has a parameter `config`, it gets the complete config, and
    otherwise the keys that are its parameters."""
    parameters = list(inspect.signature(module_cls).parameters.values())
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    given = {"config": config} if "config" in names else {name: config[name] for name in names if name in config}
    needed = [each.name for each in parameters if each.default is each.empty and each.name in names]
    missing = [name for name in needed if name not in given]
    if missing:
        raise ConfigError(
            f"{module_cls.__name__}.__init__ needs {missing}, and the trainer's config has only {sorted(config)}: add them to the "
            "config, or give __init__ a parameter `config`"
        )
    return module_cls(**given)


def overrides(module: Any, base: type, hook: str) -> bool:
    """Whether the module overrides this hook."""
    own = getattr(type(module), hook, None)
    return own is not None and own is not getattr(base, hook, None)


def refuse_unsupported(module: Any, base: type, settings: TorchSettings) -> None:
    name = type(module).__name__
    for needed in ("training_step", "configure_optimizers"):
        if not overrides(module, base, needed):
            raise ConfigError(f"{name} has no {needed}, and raysgd cannot train it without one: define it")
    found = [hook for hook in UNSUPPORTED if overrides(module, base, hook)]
    if found:
        raise ConfigError(
            f"{name} overrides {', '.join(found)}, which raysgd does not call: move that code to on_train_epoch_end or "
            "on_validation_epoch_end, or to the script that calls trainer.train()"
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise ConfigError(
            f"{name}.training_step(dataloader_iter) is not supported: define training_step(batch, batch_idx)"
        )
    if not module.automatic_optimization:
        raise ConfigError(
            f"{name}.automatic_optimization is False, and from_ptl steps the optimizer itself: use Lightning's Trainer in a "
            "training function, with raysgd.train.lightning.prepare_trainer(trainer, elastic=False)"
        )
    given = vars(settings.options) | {"from_ptl": name}
    refuse([({"from_ptl": bool, **values}, why) for values, why in NOT_WITH_LIGHTNING], given)


def takes_index(step: Callable[..., Any]) -> bool:
    """Whether a step takes (batch, batch_idx), and not only (batch)."""
    parameters = inspect.signature(step).parameters.values()
    places = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return len(places) > 1 or any(each.kind is each.VAR_POSITIONAL for each in parameters)


def one_loader(given: Any, name: str) -> Any:
    """Find the loader in what a module returned or the user passed: exactly one."""
    if hasattr(given, "prepare_data") and hasattr(given, "train_dataloader"):
        raise ConfigError(
            f"{name} is a {type(given).__name__}: data modules are not supported. Pass its loaders, or call it in the "
            "module's own prepare_data, setup and train_dataloader"
        )
    several = list(given.values()) if isinstance(given, dict) else given if isinstance(given, (list, tuple)) else None
    if several is None or not several or not all(hasattr(each, "dataset") for each in several):
        if isinstance(given, dict) or hasattr(given, "flattened"):
            raise ConfigError(
                f"{name} gives several loaders ({type(given).__name__}), and raysgd takes one: join the data sets"
            )
        return given
    if len(several) > 1:
        raise ConfigError(f"{name} gives {len(several)} loaders, and raysgd takes one: join the data sets")
    return several[0]
