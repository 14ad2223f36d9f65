"""How a trainer's ranks connect and average gradients: the argument `backend`. Driver."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from raysgd.config import Exclusions, one_of, refuse
from raysgd.core.protocols import ProcessGroupBackend
from raysgd.errors import ConfigError
from raysgd.torch.options import TrainingOptions
from raysgd.torch.process_group import TorchBackend, name_for
from raysgd.torch.wrapping import Exchange

NOT_WITH_HOROVOD: Exclusions = (
    ({"parallel": ("fsdp",)}, "Horovod averages the gradients of full models. Use backend='auto'"),
    ({"ddp_args": bool}, "Horovod does not use DistributedDataParallel, and its own arguments go into horovod_args"),
    ({"comm_hook": bool}, "Horovod does not use DistributedDataParallel. Use horovod_args={'compression': 'fp16'}"),
    ({"sync_batchnorm": bool}, "use backend='auto', or Horovod's hvd.SyncBatchNorm in your model"),
    ({"horovod_args": bool, "parallel": (None,)}, "they are for gradients that the trainer averages"),
    ({"precision": ("apex",)}, "both replace the optimizers. Use precision='fp16' or 'bf16'"),
)


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

    def of_replicas(self, workers: int) -> dict[str, Any]:
        """Return what the replicas of so many workers need to know of it."""
        several = workers > 1
        return {"exchange": self.make_exchange if several else Exchange, "asynchronous": several and self.asynchronous}


def choose_strategy(backend: Any, options: TrainingOptions, horovod_args: Any, *, gpus: float) -> Strategy:
    """Return the strategy for `backend`. Raise ConfigError for options that exclude it. Each worker
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
            make_backend=functools.partial(TorchBackend, name, replicas=options.replicas),
            asynchronous=name == "nccl",
        )
    return _horovod(options, horovod_args, use_gpu=use_gpu)


def _horovod(options: TrainingOptions, horovod_args: Any, *, use_gpu: bool) -> Strategy:
    from raysgd.horovod.arguments import HorovodArguments, check_installed

    arguments = HorovodArguments.parse(horovod_args)
    given = {**vars(options), "backend": "horovod", "horovod_args": horovod_args}
    refuse([({"backend": ("horovod",), **values}, why) for values, why in NOT_WITH_HOROVOD], given)
    check_installed("torch")
    if use_gpu and not import_module("horovod.torch").cuda_built():
        raise ConfigError(
            "this Horovod was built without CUDA: build it with HOROVOD_GPU_OPERATIONS=NCCL in the environment (and "
            "NCCL installed), pass use_gpu=False, or use backend='nccl'"
        )
    from raysgd.horovod.exchange import HorovodExchange

    own = functools.partial(HorovodExchange, arguments)
    return Strategy(
        make_backend=_horovod_backend,
        make_exchange=own if options.parallel == "ddp" else Exchange,
        wraps=False,
    )


def _horovod_backend(**given: Any) -> ProcessGroupBackend:
    from raysgd.horovod.backend import HorovodBackend

    return HorovodBackend(**given)
