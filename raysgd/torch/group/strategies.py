"""How a trainer's ranks connect and average gradients: the argument `backend`. Driver."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raysgd.config import one_of
from raysgd.core import offers
from raysgd.core.protocols import ProcessGroupBackend
from raysgd.errors import ConfigError
from raysgd.torch.group.process_group import TorchBackend, name_for
from raysgd.torch.group.wrapping import Exchange
from raysgd.torch.options import TrainingOptions


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """How ranks connect and average gradients.

    make_backend   makes the engine's backend, on the driver
    make_exchange  makes the object that averages gradients, in each worker
    wraps          whether models are wrapped in DistributedDataParallel
    asynchronous   whether collective calls return before the device has made them
    """

    make_backend: Callable[..., ProcessGroupBackend]
    make_exchange: Callable[[], Exchange] = Exchange
    wraps: bool = True
    asynchronous: bool = False

    def replica_settings(self, is_distributed: bool, options: TrainingOptions) -> dict[str, Any]:
        """The settings of the replicas that depend on it, of one worker or `several`."""
        return {
            "wrap_ddp": options.parallel == "ddp" and self.wraps,
            "exchange": self.make_exchange if is_distributed else Exchange,
            "asynchronous": is_distributed and self.asynchronous,
        }


def choose_strategy(backend: Any, options: TrainingOptions, horovod_args: Any, *, gpus: float) -> Strategy:
    """Choose the strategy for `backend`. Raise ConfigError for options that exclude it. Each worker
    has so many `gpus`."""
    one_of("backend", backend, "auto", "gloo", "nccl", "horovod")
    name = backend if backend == "horovod" else name_for(None if backend == "auto" else backend, gpus)
    use_gpu = gpus > 0
    if name in ("gloo", "nccl"):
        if horovod_args is not None:
            raise ConfigError(
                f"horovod_args are only for backend='horovod', got backend={name!r}: leave one of them out"
            )
        if name == "gloo" and use_gpu and options.parallel == "fsdp":
            raise ConfigError(
                "backend='gloo' and parallel='fsdp' cannot be combined on GPUs, because gloo sends no tensors from one GPU to "
                "another: leave backend out (it is 'nccl'), or pass parallel='ddp' or use_gpu=False"
            )
        return Strategy(
            make_backend=functools.partial(TorchBackend, name, in_place=options.parallel != "fsdp"),
            asynchronous=name == "nccl",
        )
    strategy: Strategy = offers.horovod_strategy(options, horovod_args, use_gpu=use_gpu)
    return strategy
