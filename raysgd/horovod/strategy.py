"""Horovod as a strategy of TorchTrainer. Driver."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

from raysgd.config import Exclusions, refuse
from raysgd.errors import ConfigError
from raysgd.horovod.arguments import HorovodArguments, check_installed
from raysgd.horovod.backend import HorovodBackend
from raysgd.horovod.exchange import HorovodExchange
from raysgd.torch.group.strategies import Strategy
from raysgd.torch.group.wrapping import Exchange
from raysgd.torch.options import TrainingOptions

NOT_WITH_HOROVOD: Exclusions = (
    ({"parallel": ("fsdp",)}, "Horovod averages the gradients of full models. Use backend='auto'"),
    ({"ddp_args": bool}, "Horovod does not use DistributedDataParallel, and its own arguments go into horovod_args"),
    ({"comm_hook": bool}, "Horovod does not use DistributedDataParallel. Use horovod_args={'compression': 'fp16'}"),
    ({"sync_batchnorm": bool}, "use backend='auto', or Horovod's hvd.SyncBatchNorm in your model"),
    ({"horovod_args": bool, "parallel": (None,)}, "they are for gradients that the trainer averages"),
    ({"precision": ("apex",)}, "both replace the optimizers. Use precision='fp16' or 'bf16'"),
)


def horovod_strategy(options: TrainingOptions, horovod_args: Any, *, use_gpu: bool) -> Strategy:
    """Make the strategy for `backend="horovod"`. Raise ConfigError for options that exclude it."""
    arguments = HorovodArguments.parse(horovod_args)
    settings = {**vars(options), "backend": "horovod", "horovod_args": horovod_args}
    refuse([({"backend": ("horovod",), **values}, why) for values, why in NOT_WITH_HOROVOD], settings)
    check_installed("torch")
    if use_gpu and not import_module("horovod.torch").cuda_built():
        raise ConfigError(
            "this Horovod was built without CUDA: build it with HOROVOD_GPU_OPERATIONS=NCCL in the environment (and "
            "NCCL installed), pass use_gpu=False, or use backend='nccl'"
        )
    make_exchange = functools.partial(HorovodExchange, arguments)
    return Strategy(
        make_backend=HorovodBackend,
        make_exchange=make_exchange if options.parallel == "ddp" else Exchange,
        wraps=False,
    )
