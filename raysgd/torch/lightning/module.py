"""Makes a LightningModule from its class and the config; says what of Lightning has no counterpart here."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from torch import nn

from raysgd.errors import ConfigError
from raysgd.torch.settings import TorchSettings

__all__ = [
    "construct",
    "lightning_base",
    "one_loader",
    "optimizer_wrapper",
    "overrides",
    "refuse_unsupported",
    "takes_index",
]

PACKAGES = ("lightning", "pytorch_lightning")
# A module that overrides these would be passed over in silence; the script decides what happens there.
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


def lightning_base(module_cls: Any) -> type:
    """The LightningModule that this class is made from: of `lightning`, or of `pytorch_lightning`."""
    if not isinstance(module_cls, type):
        given = (
            f"an object of type {type(module_cls).__name__}" if isinstance(module_cls, nn.Module) else repr(module_cls)
        )
        raise ConfigError(
            f"from_ptl takes a LightningModule class (not an object, each worker makes its own), got {given}"
        )
    for each in module_cls.__mro__:
        if each.__name__ == "LightningModule" and each.__module__.split(".")[0] in PACKAGES:
            break
    else:
        raise ConfigError(
            f"from_ptl takes a subclass of LightningModule, got {module_cls.__name__}. "
            "The package is an extra: pip install 'raysgd[lightning]'"
        )
    package = each.__module__.split(".")[0]
    version = str(getattr(sys.modules[package], "__version__", "2"))
    if int(version.split(".")[0]) < 2:
        raise ConfigError(f"from_ptl needs {package} 2.1 or newer, got {version}")
    return each


def optimizer_wrapper(base: type) -> Callable[[Any], Any]:
    """LightningOptimizer, of the package that the module is from."""
    root = base.__module__.rsplit(".core", 1)[0]
    wrapper: Callable[[Any], Any] = import_module(f"{root}.core.optimizer").LightningOptimizer
    return wrapper


def construct(module_cls: type, config: Mapping[str, Any]) -> Any:
    """A module. Its `__init__` gets the whole config as `config` if it takes that; else the keys it names."""
    parameters = list(inspect.signature(module_cls).parameters.values())
    names = [each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    given = {"config": config} if "config" in names else {name: config[name] for name in names if name in config}
    needed = [each.name for each in parameters if each.default is each.empty and each.name in names]
    missing = [name for name in needed if name not in given]
    if missing:
        raise ConfigError(
            f"{module_cls.__name__}.__init__ needs {missing}, and the trainer's config has only "
            f"{sorted(config)}: put them there, or take `config` as a parameter"
        )
    return module_cls(**given)


def overrides(module: Any, base: type, hook: str) -> bool:
    """Has the module a hook of its own?"""
    own = getattr(type(module), hook, None)
    return own is not None and own is not getattr(base, hook, None)


def refuse_unsupported(module: Any, base: type, settings: TorchSettings) -> None:
    name = type(module).__name__
    for needed in ("training_step", "configure_optimizers"):
        if not overrides(module, base, needed):
            raise ConfigError(f"{name} has no {needed}: there is nothing to train it with")
    found = [hook for hook in UNSUPPORTED if overrides(module, base, hook)]
    if found:
        raise ConfigError(
            f"{name} overrides {', '.join(found)}, which raysgd does not call: move that work to "
            "on_train_epoch_end or on_validation_epoch_end, or into the script around trainer.train()"
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise ConfigError(f"{name}.training_step(dataloader_iter) is not supported: take (batch, batch_idx)")
    _refuse_options(settings, automatic=module.automatic_optimization)


def _refuse_options(settings: TorchSettings, *, automatic: bool) -> None:
    options = settings.options
    if options.precision == "apex":
        raise ConfigError("precision 'apex' is not supported with from_ptl: use 'fp16' or 'bf16'")
    if options.parallel == "fsdp":
        raise ConfigError("parallel='fsdp' is not supported with from_ptl: use 'ddp'")
    if options.accumulate > 1:
        raise ConfigError(
            f"accumulate={options.accumulate} is not supported with from_ptl: use larger batches, or "
            "accumulate in the module with automatic_optimization = False"
        )
    if options.clip_norm is not None and options.clip_value is not None:
        raise ConfigError("clip_norm and clip_value together are not supported with from_ptl: pass one")
    for name in ("clip_norm", "clip_value", "comm_hook"):
        if not automatic and getattr(options, name) is not None:
            raise ConfigError(
                f"{name} is not supported with automatic_optimization = False: leave it to the module's "
                "training_step, with self.clip_gradients for instance"
            )


def takes_index(step: Callable[..., Any]) -> bool:
    """Is a step written as (batch, batch_idx), or as (batch) alone?"""
    parameters = inspect.signature(step).parameters.values()
    places = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return len(places) > 1 or any(each.kind is each.VAR_POSITIONAL for each in parameters)


def one_loader(given: Any, name: str) -> Any:
    """A loader from what a module gives or a user passes; several are not supported."""
    if hasattr(given, "prepare_data") and hasattr(given, "train_dataloader"):
        raise ConfigError(
            f"{name} is a {type(given).__name__}: data modules are not supported. Pass its loaders, or "
            "let the module's own prepare_data, setup and train_dataloader call it"
        )
    several = list(given.values()) if isinstance(given, dict) else given if isinstance(given, (list, tuple)) else None
    if several is None or not several or not all(hasattr(each, "dataset") for each in several):
        if isinstance(given, dict) or hasattr(given, "flattened"):
            raise ConfigError(f"{name} gives several loaders ({type(given).__name__}), and raysgd takes one")
        return given
    if len(several) > 1:
        raise ConfigError(f"{name} gives {len(several)} loaders, and raysgd takes one: join the data sets")
    return several[0]
