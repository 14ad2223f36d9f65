"""Helpers for PyTorch training functions: devices, models, data loaders, mixed precision,
profiling. Worker.

All of them are optional; they replace the usual boilerplate.

    train.torch.accelerate(amp=True)
    model = train.torch.prepare_model(model)
    loader = train.torch.prepare_data_loader(loader)
    optimizer = train.torch.prepare_optimizer(optimizer)
    ...
        train.torch.backward(loss)
        optimizer.step()
"""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from raysgd.callbacks.base import TRACES
from raysgd.core.lazy import REFUSED, lazy_names
from raysgd.core.tree import mapped
from raysgd.errors import ConfigError
from raysgd.torch.step.precision import Bf16, Fp16, Precision, make_precision
from raysgd.torch.step.profiling import TraceKeeper
from raysgd.train.backends import TorchConfig
from raysgd.train.loaders import ElasticLoader, PreparedLoader, distribute
from raysgd.train.sessions import current

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
    "unscale",
]

SCALER = "scaler"  # the key of its state in that of a prepared optimizer


def get_device() -> torch.device:
    """Get this worker's device: its GPU among those of its node, or the CPU."""
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
    """Move the model to this worker's device, with automatic mixed precision after
    `accelerate(amp=True)`, and wrap it in DistributedDataParallel if there are several workers."""
    session = current("torch.prepare_model")
    session.prepared.append(model)
    device = get_device()
    if move_to_device:
        model = model.to(device)
    if isinstance(session.precision, (Fp16, Bf16)):
        model.forward = _InAutocast(model.forward, session.precision)
    if wrap_ddp and session.rank_info.world_size > 1 and any(p.requires_grad for p in model.parameters()):
        arguments: dict[str, Any] = dict(ddp_kwargs or {})
        if device.type == "cuda" and move_to_device:
            arguments = {"device_ids": [device], "output_device": device, **arguments}
        return DistributedDataParallel(model, **arguments)
    return model


def prepare_data_loader(
    data_loader: DataLoader[Any],
    add_dist_sampler: bool = True,
    move_to_device: bool = True,
    auto_transfer: bool = True,
) -> PreparedLoader:
    """Make a loader of this worker's part of the data, with batches on the worker's device. If the
    loader shuffles, each epoch has another order. The batch size is per worker. With
    `auto_transfer`, the next batch is copied to a GPU while the model computes; this has no effect
    on a CPU."""
    session = current("torch.prepare_data_loader")
    if not isinstance(data_loader, DataLoader):
        raise ConfigError(f"prepare_data_loader takes a torch DataLoader, got {data_loader!r}")
    if add_dist_sampler and session.planned_ranks > 1:  # also in one that is left, so that the order stays
        data_loader = distribute(data_loader, session.rank_info)
    return PreparedLoader(data_loader, get_device() if move_to_device else None, session, ahead=auto_transfer)


def elastic_data_loader(data_loader: DataLoader[Any], move_to_device: bool = True) -> ElasticLoader:
    """Make a loader that uses every sample of an epoch exactly once, even if the number of workers
    changes during it.

    Pass it to `train.elastic` together with the model, and commit after each step.
    """
    session = current("torch.elastic_data_loader")
    loader = ElasticLoader(data_loader, session.rank_info, get_device() if move_to_device else None)
    session.prepared.append(loader)
    session.at_end.callback(loader.close)
    return loader


def enable_reproducibility(seed: int = 0) -> None:
    """Seed torch, NumPy and Python (and thus the processes of data loaders), and select
    deterministic kernels. Different machines or versions may still give different results."""
    current("torch.enable_reproducibility")
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"


# -- automatic mixed precision ------------------------------------------------------------------------


def accelerate(amp: bool = False) -> None:
    """Turn on automatic mixed precision for `prepare_model`, `prepare_optimizer` and `backward`:
    float16 with a scaled loss on a GPU, bfloat16 on a CPU. Call it first in the function. In one
    that is called directly, it holds in this process until it is called again."""
    session = current("torch.accelerate")
    device = get_device()
    name = "fp32" if not amp else "fp16" if device.type == "cuda" else "bf16"
    session.set_precision(make_precision(name, device))


def prepare_optimizer(optimizer: Optimizer) -> Optimizer:
    """Wrap the `optimizer` to unscale the gradients if the loss is scaled."""
    precision = current("torch.prepare_optimizer").precision
    return ScaledOptimizer(optimizer, precision) if isinstance(precision, Fp16) else optimizer


def backward(tensor: torch.Tensor) -> None:
    """Compute the gradients of the loss, which mixed precision may scale first."""
    precision: Precision = current("torch.backward").precision or Precision()
    if isinstance(precision, Fp16):
        precision.update()
    precision.backward(tensor)


def unscale(optimizer: Optimizer) -> None:
    """Divide the gradients by the scale of the loss, to clip or read them before
    `optimizer.step()`. Where the loss is not scaled, this does nothing."""
    current("torch.unscale")
    if isinstance(optimizer, ScaledOptimizer):
        optimizer.unscale()


class _InAutocast:
    """Runs a model's `forward` in mixed precision. The model's parameters, its class and its state
    dict do not change. A deep copy of the model has a deep copy of this object, whose bound
    `forward` is that of the copy, with the copy's weights."""

    def __init__(self, forward: Callable[..., Any], precision: Precision) -> None:
        self._forward, self._precision = forward, precision

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._precision.autocast():
            return _in_float32(self._forward(*args, **kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> _InAutocast:
        return _InAutocast(copy.deepcopy(self._forward, memo), self._precision)


def _in_float32(output: Any) -> Any:
    """Convert a model's output, so that the loss is computed in full precision. Its class stays:
    the items of a `ModelOutput` of transformers are its attributes, too."""
    converted = mapped(_to_float32, output)
    if not isinstance(output, dict) or type(output) is type(converted):
        return converted
    result = copy.copy(output)
    for key, value in converted.items():
        result[key] = value
    return result


def _to_float32(value: Any, *_: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16)
    return value.float() if is_half else value


class ScaledOptimizer(Optimizer):
    """Wraps the user's optimizer, and shares its state. `step` uses the gradient scaler, which is
    in `state_dict`, too."""

    def __init__(self, optimizer: Optimizer, precision: Fp16) -> None:
        # Optimizer.__init__ is not called: the wrapped optimizer has everything that it would create.
        self.optimizer, self._precision = optimizer, precision

    def __getattr__(self, name: str) -> Any:
        if name in ("optimizer", "_precision"):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def scaler(self) -> torch.amp.GradScaler:
        return self._precision.scaler

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Any = None) -> Any:
        """Apply the gradients. If they overflowed, leave the step out; the next backward pass has a
        smaller scale."""
        if closure is not None:
            return self.scaler.step(self.optimizer, closure)  # which refuses it
        self._precision.step(self.optimizer)
        return None

    def unscale(self) -> None:
        self._precision.unscale(self.optimizer)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        self._precision.update()
        return {**self.optimizer.state_dict(), SCALER: self._precision.state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if SCALER in state_dict:
            self._precision.load(state_dict[SCALER])
        self.optimizer.load_state_dict({name: each for name, each in state_dict.items() if name != SCALER})


# -- profiling ----------------------------------------------------------------------------------------


class TorchWorkerProfiler:
    """Collects what a `torch.profiler.profile` of yours records, and sends it with a report. Traces
    lie in `trace_dir` until then, by default a temporary folder.

        profiler = train.torch.TorchWorkerProfiler()
        with torch.profiler.profile(schedule=..., on_trace_ready=profiler.trace_handler) as profile:
            ...
            profile.step()
        train.report(loss=loss, **profiler.get_and_clear_profile_traces())

    `TorchTensorboardProfilerCallback` writes the traces on the driver. Other callbacks do not get
    them.
    """

    def __init__(self, trace_dir: str | Path | None = None) -> None:
        """With `trace_dir`, traces are also written there, on the worker's machine."""
        self._folder = None if trace_dir is None else Path(trace_dir)
        self._traces = TraceKeeper(current("torch.TorchWorkerProfiler").rank_info.world_rank)

    def trace_handler(self, profiler: Any) -> None:
        """Keep the trace of this `profiler`: an `on_trace_ready` handler."""
        self._traces.keep(profiler, self._folder)

    def get_and_clear_profile_traces(self) -> dict[str, Any]:
        """Take the traces since the last call, as an argument for `train.report`."""
        traces = self._traces.taken()
        return {TRACES: traces} if traces else {}


# As in Ray. The module of this name imports Ray, which the workers do not need.
__path__: list[str] = []  # lets Python look for `raysgd.train.torch.config`, which raysgd.compat provides
_HOMES = dict.fromkeys(("TorchAccelerator", "TorchCheckpoint", "TorchPredictor"), REFUSED)
_HOMES["TorchTrainer"] = "raysgd.train.fit.frameworks"
__getattr__ = lazy_names("raysgd.train.torch", _HOMES)[0]
