"""How registered models become ready to train: memory format, SyncBatchNorm, compiler, DDP. Worker.

The order matters: memory format and layers first, then the compiler, then DDP around it. torch
compiles the inner model's frame in either order, and splits it at DDP's buckets when DDP is the
caller; but with DDP outside, a new generation replaces only DDP, and the compiled code stays valid.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from raysgd.torch.foreign import compile_in_place, uncompiled
from raysgd.torch.options import TrainingOptions

# The optimizers and types for which torch's two ways to update on the CPU have equal results; the fewest parameters for which the faster
# one gains time, and the most bytes for which it is used: it keeps intermediate results of that size.
TOGETHER, EXACT = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW), (torch.float32, torch.float64)
FEWEST_TOGETHER, LARGEST_TOGETHER = 8, 64 << 20
HOOKS = "torch.distributed.algorithms.ddp_comm_hooks"


class Exchange:
    """Averages gradients where no wrapper around the models does it. Each operator has one.

    This one does nothing: DDP, FSDP or the user's code averages the gradients.
    """

    def prepare(self, models: list[Any], optimizers: list[Any]) -> None:
        """Called once, when the operator registers its parts."""

    def equalize(self) -> None:
        """Called once, on all ranks that register their parts together: make their weights the
        same."""

    def joined(self) -> None:
        """Called on all ranks when the process group of a generation is up, and their weights are
        the same: reset the exchange."""

    def begin_call(self) -> None:
        """Called on all ranks when a call of the trainer begins."""

    def hold(self, on: bool) -> None:
        """Called before each batch of a window and each part; `on`: gradients stay here."""

    def finish(self, optimizer: Any) -> None:
        """Called before a step and before gradients are cleared: wait for their exchange."""


def formatted(models: list[nn.Module], options: TrainingOptions, *, distributed: bool) -> list[nn.Module]:
    """Convert the models to the memory format and the BatchNorm layers of the options. Their
    parameters remain the same objects, so the optimizers that refer to them stay valid."""
    if options.sync_batchnorm and distributed:
        models = [nn.SyncBatchNorm.convert_sync_batchnorm(model) for model in models]
    if options.channels_last:
        models = [model.to(memory_format=torch.channels_last) for model in models]  # type: ignore[call-overload]
    return models


def compile_models(models: list[nn.Module], options: TrainingOptions) -> None:
    """Compile the models in place, if the options ask for it."""
    if options.compile:
        for model in models:
            arguments = options.compile if isinstance(options.compile, Mapping) else {}
            compile_in_place(model, **arguments)


def ddp_arguments(
    options: TrainingOptions, registered: Mapping[str, Any] | None, device_ids: list[int] | None
) -> dict[str, Any]:
    """DistributedDataParallel's arguments; those of `register` override the options."""
    return {
        "device_ids": device_ids,
        "gradient_as_bucket_view": True,  # gradients are views of the buffers that are sent: one copy less
        **options.ddp_args,
        **(registered or {}),
    }


def rewrap(
    wrapped: list[nn.Module],
    trained: Collection[nn.Parameter],
    arguments: dict[str, Any],
    options: TrainingOptions,
) -> None:
    """Initialize every DDP wrapper again, in place, for the process group of a new generation,
    whose ranks have equal states. References to the wrappers stay valid. It averages the gradients
    of those parameters that were `trained` when it was made, also if they are frozen just now.

    The old reducer must be removed first, because it has hooks on the parameters and holds the old
    process group.
    """
    for wrapper in wrapped:
        if isinstance(wrapper, DistributedDataParallel):
            inside, mode = wrapper.module, wrapper.training
            for name in ("reducer", "logger"):
                wrapper.__dict__.pop(name, None)
            with _requiring(trained, inside):
                DistributedDataParallel.__init__(wrapper, inside, **{**arguments, "init_sync": False})
            wrapper.training = mode  # not train(mode): submodules that were frozen in eval mode stay in it
    adapt(wrapped, arguments, options)


@contextmanager
def _requiring(trained: Collection[nn.Parameter], model: nn.Module) -> Iterator[None]:
    """A context in which these parameters of a model require gradients, and no others."""
    before = [(each, each.requires_grad) for each in model.parameters()]
    known = {id(each) for each in trained}
    for each, _ in before:
        each.requires_grad_(id(each) in known)
    try:
        yield
    finally:
        for each, required in before:
            each.requires_grad_(required)


def sends_buffers(arguments: Mapping[str, Any]) -> bool | None:
    """What these arguments of DistributedDataParallel say about sending buffers in forward passes;
    None if nothing."""
    answer: bool | None = arguments.get("forward_sync_buffers", arguments.get("broadcast_buffers"))
    return answer


def adapt(wrapped: list[nn.Module], arguments: Mapping[str, Any], options: TrainingOptions) -> None:
    """Register the communication hook of the options on new DDP wrappers. PowerSGD starts without
    past errors, because these belong to one rank of one generation. Let them send no buffers, as
    `RestoreBuffers` does, unless the user has passed that."""
    for wrapper in wrapped:
        if isinstance(wrapper, DistributedDataParallel):
            if sends_buffers(arguments) is None:
                wrapper.broadcast_buffers = False  # only now, because all ranks begin with those of rank 0
            if options.hook_name is not None:
                state, hook = _hook(options.hook_name, options.hook_args)
                wrapper.register_comm_hook(state, hook)


def unwrapped(model: Any) -> Any:
    """What is inside of torch's wrappers, and of what `torch.compile` returned."""
    kinds: tuple[Any, ...] = nn.DataParallel, DistributedDataParallel
    if "torch.distributed.fsdp" in sys.modules:  # otherwise nothing is wrapped in it, and the import is slow
        kinds += (sys.modules["torch.distributed.fsdp"].FullyShardedDataParallel,)
    while True:
        inner = model.module if isinstance(model, kinds) else uncompiled(model)
        if inner is model:
            return model
        model = inner


def update_together(optimizers: Iterable[Any]) -> None:
    """Let optimizers on the CPU update the parameters of a group together (`foreach=True`), if the
    user has left that choice to torch, which makes it on GPUs only. The weights are equal bit by
    bit, and small models take less time. Large models do not, and would need more memory."""
    for optimizer in optimizers:
        parameters = [each for group in getattr(optimizer, "param_groups", ()) for each in group["params"]]
        usual = all(type(each) is nn.Parameter and each.is_cpu and each.dtype in EXACT for each in parameters)
        size = sum(each.numel() * each.element_size() for each in parameters)
        if type(optimizer) in TOGETHER and usual and len(parameters) >= FEWEST_TOGETHER and size <= LARGEST_TOGETHER:
            _update_together(optimizer)


def _update_together(optimizer: torch.optim.Optimizer) -> None:
    """Choose `foreach` while the optimizer steps, so that its state is that of the user's
    optimizer. With `nesterov`, torch would change the gradients, and a rate in a tensor would be an
    error, so nothing is chosen then."""
    chosen: list[dict[str, Any]] = []

    def before(stepping: Any, *_: Any) -> None:
        for group in stepping.param_groups:
            theirs = any(group.get(name) for name in ("foreach", "fused", "nesterov", "capturable", "differentiable"))
            numbers = (group["lr"], *group.get("betas", ()))
            if group["foreach"] is None and not theirs and all(isinstance(each, (int, float)) for each in numbers):
                group["foreach"] = True
                chosen.append(group)

    def after(*_: Any) -> None:
        while chosen:
            chosen.pop()["foreach"] = None

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def _hook(name: str, arguments: dict[str, Any]) -> tuple[Any, Callable[..., Any]]:
    if name in ("fp16", "bf16"):
        return None, getattr(import_module(f"{HOOKS}.default_hooks"), f"{name}_compress_hook")
    module = import_module(f"{HOOKS}.powerSGD_hook")
    hook = module.batched_powerSGD_hook if name == "batched_powersgd" else module.powerSGD_hook
    return module.PowerSGDState(process_group=None, **arguments), hook
