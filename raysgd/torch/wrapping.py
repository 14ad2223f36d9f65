"""How bare models become trained ones: memory format, shared BatchNorm, compiler, DDP and the way it sends gradients.

The order matters, and is: format and layers first, then the compiler, then DDP around it. torch compiles the inner
model's frame in either order and cuts it at DDP's buckets when DDP is the caller; but with DDP outside, a new
generation exchanges only DDP, and what was compiled stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raysgd.torch.foreign import compile_in_place
from raysgd.torch.options import TrainingOptions

__all__ = ["compiled", "ddp_arguments", "formatted", "hooked", "rewrap"]

HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"


def formatted(models: list[nn.Module], options: TrainingOptions, *, distributed: bool) -> list[nn.Module]:
    """In the memory format and with the BatchNorm layers asked for. Parameters stay the same objects, so optimizers
    that hold them stay right."""
    if options.sync_batchnorm and distributed:
        models = [nn.SyncBatchNorm.convert_sync_batchnorm(model) for model in models]
    if options.channels_last:
        models = [model.to(memory_format=torch.channels_last) for model in models]  # type: ignore[call-overload]
    return models


def compiled(models: list[nn.Module], options: TrainingOptions) -> None:
    """Compile the models in place, if the options ask for it."""
    if options.compile:
        for model in models:
            arguments = options.compile if isinstance(options.compile, Mapping) else {}
            compile_in_place(model, **arguments)


def ddp_arguments(
    options: TrainingOptions, registered: Mapping[str, Any] | None, device_ids: list[int] | None
) -> dict[str, Any]:
    options.check_ddp(registered or {})
    return {
        "device_ids": device_ids,
        "gradient_as_bucket_view": True,  # gradients live in what is sent: one copy less, and less memory
        **options.ddp_args,
        **(registered or {}),
    }


def rewrap(wrapped: list[nn.Module], arguments: dict[str, Any], options: TrainingOptions) -> None:
    """A new generation stands: every DDP wrapper starts over in place, so that all who hold it keep it.

    The old reducer must go first: it holds hooks on the parameters, and the old process group.
    """
    for wrapper in wrapped:
        if isinstance(wrapper, DistributedDataParallel):
            inside, mode = wrapper.module, wrapper.training
            for name in ("reducer", "logger"):
                wrapper.__dict__.pop(name, None)
            DistributedDataParallel.__init__(wrapper, inside, **arguments)
            wrapper.training = mode  # not train(mode): parts that are frozen in eval mode stay so
    hooked(wrapped, options)


def hooked(wrapped: list[nn.Module], options: TrainingOptions) -> None:
    """Registers the communication hook on what is fresh DDP. PowerSGD's memory of past errors begins anew, as it is
    this rank's of that generation."""
    if options.hook_name is None:
        return
    for wrapper in wrapped:
        if isinstance(wrapper, DistributedDataParallel):
            state, hook = _hook(options.hook_name, options.hook_args)
            wrapper.register_comm_hook(state, hook)


def _hook(name: str, arguments: dict[str, Any]) -> tuple[Any, Callable[..., Any]]:
    if name in ("fp16", "bf16"):
        return None, getattr(import_module(f"{HOOKS}.default_hooks"), f"{name}_compress_hook")
    module = import_module(f"{HOOKS}.powerSGD_hook")
    hook = module.batched_powerSGD_hook if name == "batched_powersgd" else module.powerSGD_hook
    return module.PowerSGDState(process_group=None, **arguments), hook
