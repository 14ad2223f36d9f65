"""Helpers for torch training functions. All of it works without them too; they save the usual lines.

train.torch.accelerate(amp=True)
model = train.torch.prepare_model(model)
loader = train.torch.prepare_data_loader(loader)
optimizer = train.torch.prepare_optimizer(optimizer)
...
    train.torch.backward(loss)
    optimizer.step()
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from raysgd.errors import ConfigError
from raysgd.train.amp import Amp, ScaledOptimizer, with_autocast
from raysgd.train.backends import TorchConfig
from raysgd.train.loaders import ElasticLoader, PreparedLoader, distributed
from raysgd.train.profiling import TorchWorkerProfiler
from raysgd.train.run_session import current

__all__ = [
    "ElasticLoader",
    "TorchConfig",
    "TorchWorkerProfiler",
    "accelerate",
    "backward",
    "elastic_data_loader",
    "enable_reproducibility",
    "get_device",
    "prepare_data_loader",
    "prepare_model",
    "prepare_optimizer",
]


def get_device() -> torch.device:
    """The device of this worker: its own GPU among those that its node's workers see, else the CPU."""
    current("torch.get_device")
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def prepare_model(
    model: nn.Module,
    move_to_device: bool = True,
    wrap_ddp: bool = True,
    ddp_kwargs: Mapping[str, Any] | None = None,
) -> nn.Module:
    """On this worker's device, with automatic mixed precision if `accelerate` was called, and wrapped in
    DistributedDataParallel where there are several workers."""
    session = current("torch.prepare_model")
    device = get_device()
    if move_to_device:
        model = model.to(device)
    amp = session.amp
    if isinstance(amp, Amp) and amp.enabled:
        with_autocast(model, amp, device)
    if wrap_ddp and session.rank_info.world_size > 1 and any(p.requires_grad for p in model.parameters()):
        given: dict[str, Any] = dict(ddp_kwargs or {})
        if device.type == "cuda" and move_to_device:
            given = {"device_ids": [device], "output_device": device, **given}
        return DistributedDataParallel(model, **given)
    return model


def prepare_data_loader(
    data_loader: DataLoader[Any], add_dist_sampler: bool = True, move_to_device: bool = True
) -> PreparedLoader:
    """Each worker's own part of the data, shuffled anew in every epoch if the loader shuffles, with batches on the
    worker's device. The batch size is per worker."""
    session = current("torch.prepare_data_loader")
    if not isinstance(data_loader, DataLoader):
        raise ConfigError(f"prepare_data_loader takes a torch DataLoader, got {data_loader!r}")
    if add_dist_sampler and session.rank_info.world_size > 1:
        data_loader = distributed(data_loader, session.rank_info)
    return PreparedLoader(data_loader, get_device() if move_to_device else None)


def elastic_data_loader(data_loader: DataLoader[Any], move_to_device: bool = True) -> ElasticLoader:
    """Deals every sample of an epoch exactly once, also when the number of workers changes in the middle of it.

    Give it to `train.elastic` beside the model, and commit after each step.
    """
    session = current("torch.elastic_data_loader")
    return ElasticLoader(data_loader, session.rank_info, get_device() if move_to_device else None)


def accelerate(amp: bool = False) -> None:
    """Call it first in the function: from here `prepare_model`, `prepare_optimizer` and `backward` use automatic mixed
    precision (float16 with a scaled loss on a GPU, bfloat16 on a CPU)."""
    session = current("torch.accelerate")
    if session.amp is not None:
        raise RuntimeError("train.torch.accelerate was called before in this function: call it once, at the top")
    session.amp = Amp(get_device(), enabled=amp)


def prepare_optimizer(optimizer: Optimizer) -> Optimizer:
    """With `accelerate(amp=True)`, an optimizer whose `step` undoes the loss's scale; else the optimizer itself."""
    amp = current("torch.prepare_optimizer").amp
    if isinstance(amp, Amp) and amp.scaler is not None:
        return ScaledOptimizer(optimizer, amp.scaler)
    return optimizer


def backward(tensor: torch.Tensor) -> None:
    """Gradients of the loss, scaled where mixed precision asks for it."""
    amp = current("torch.backward").amp
    if isinstance(amp, Amp) and amp.scaler is not None:
        tensor = amp.scaler.scale(tensor)
    tensor.backward()


def enable_reproducibility(seed: int = 0) -> None:
    """Seeds torch, NumPy and Python (and so the processes of data loaders), and chooses deterministic kernels. It
    cannot make different machines or versions agree."""
    current("torch.enable_reproducibility")
    torch.manual_seed(seed)
    random.seed(seed)
    try:
        import numpy
    except ImportError:
        pass
    else:
        numpy.random.seed(seed)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"


def __getattr__(name: str) -> Any:
    """`from raysgd.train.torch import TorchTrainer`, as Ray has it. The trainer stands above what functions call."""
    if name == "TorchTrainer":
        return getattr(import_module("raysgd.train"), name)
    raise AttributeError(f"module 'raysgd.train.torch' has no attribute {name!r}")
