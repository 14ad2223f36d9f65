"""From a TorchTrainer's arguments to its engine: older spellings, resources, settings. Driver."""

from __future__ import annotations

import logging
import uuid
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from raysgd.callbacks.torch_profiler import ProfilerSettings
from raysgd.config import ElasticConfig, WorkerResources
from raysgd.constants import BATCH_SIZE
from raysgd.errors import ConfigError
from raysgd.ray_data.columns import RayData
from raysgd.ray_data.reader import SharedRowReaders, local_row_reader
from raysgd.torch.profiling import ProfiledReplicaFactory
from raysgd.torch.replica import TorchReplicaFactory
from raysgd.torch.settings import TorchSettings
from raysgd.torch.strategies import Strategy
from raysgd.torch.wrapping import Exchange

__all__ = [
    "REMOVED",
    "completed",
    "gpu_elsewhere",
    "opened",
    "per_worker_config",
    "replica_factory",
    "resolve_parallel",
    "resolve_precision",
    "wants_gpu",
    "warn_without_effect",
    "worker_resources",
]

logger = logging.getLogger("raysgd")

IN_SETUP = "make it in the setup of a TrainingOperator subclass, or use TrainingOperator.from_creators(...)"
REMOVED = {
    "num_replicas": "use num_workers",
    "batch_size": "put it in config; config['*batch_size'] (raysgd.utils.BATCH_SIZE) is a global one",
    "model_creator": IN_SETUP,
    "data_creator": IN_SETUP,
    "optimizer_creator": IN_SETUP,
    "scheduler_creator": IN_SETUP,
    "loss_creator": IN_SETUP,
    "data_loader_args": "pass them to the DataLoader you make in setup",
    "apex_args": "pass them to self.register(apex_args=...) in setup",
}


def warn_without_effect(use_local: bool, serialize_data_creation: Any) -> None:
    """Warn about arguments of v1 that have no effect here."""
    if use_local:
        warnings.warn(
            "use_local=True with several workers has no effect: no rank runs in the driver; get_local_operator() "
            "returns an operator made here that holds the current state",
            stacklevel=3,
        )
    if serialize_data_creation:
        warnings.warn(
            "serialize_data_creation has no effect here; pass it to TrainingOperator.from_creators(...)",
            DeprecationWarning,
            stacklevel=3,
        )


def resolve_parallel(parallel: Any, wrap_ddp: Any) -> Any:
    """Return `parallel`, which v1 called `wrap_ddp`."""
    if wrap_ddp:
        return "ddp" if parallel == "auto" else parallel
    if parallel not in ("auto", None):
        raise ConfigError(f"wrap_ddp=False means parallel=None, but parallel={parallel!r} was given: pass one")
    return None


def resolve_precision(precision: Any, use_fp16: Any) -> str:
    """Return `precision`, which v1 called `use_fp16`."""
    if use_fp16 not in (False, True, "apex"):
        raise ConfigError(f"use_fp16 must be False, True or 'apex', got {use_fp16!r}")
    old = {False: None, True: "fp16", "apex": "apex"}[use_fp16]
    if precision is None:
        return old or "fp32"
    if precision not in ("fp32", "fp16", "bf16", "apex"):
        raise ConfigError(f"precision must be 'fp32', 'fp16', 'bf16' or 'apex', got {precision!r}")
    if old is not None and old != precision:
        raise ConfigError(
            f"use_fp16={use_fp16!r} means precision={old!r}, but precision={precision!r} was given: pass one"
        )
    return str(precision)


def per_worker_config(config: Any, num_workers: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config as the trainer shows it, and as each worker gets it. The batch size is divided by the number of
    workers; a remainder is dropped with a warning."""
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(f"config must be a dict, got {config!r}")
    shown = dict(config or {})
    if BATCH_SIZE not in shown:
        return shown, dict(shown)
    total = shown[BATCH_SIZE]
    if not isinstance(total, int) or isinstance(total, bool) or total < num_workers:
        raise ConfigError(
            f"config[{BATCH_SIZE!r}] is the batch of all workers together: a whole number of at least num_workers "
            f"({num_workers}), got {total!r}"
        )
    each = total // num_workers
    if each * num_workers != total:
        warnings.warn(
            f"the global batch of {total} does not divide by {num_workers} workers: using {each} each, "
            f"{each * num_workers} together",
            stacklevel=3,
        )
    shown[BATCH_SIZE] = each * num_workers
    return shown, {**shown, BATCH_SIZE: each}


def worker_resources(num_cpus: Any, use_gpu: Any, resources: Any) -> tuple[WorkerResources, bool]:
    """Return what each worker reserves in the cluster, and whether it trains on a GPU."""
    wanted = wants_gpu(use_gpu)
    asked = None if use_gpu == "auto" else wanted
    parsed = WorkerResources.parse(num_cpus, wanted, resources, gpu_asked=asked)
    return parsed, wanted or parsed.gpus > 0


def wants_gpu(use_gpu: Any) -> bool:
    """Return whether workers train on GPUs; "auto" means that they do if this machine has one."""
    if use_gpu == "auto":
        return bool(torch.cuda.is_available())
    if not isinstance(use_gpu, bool):
        raise ConfigError(f"use_gpu must be True, False or 'auto', got {use_gpu!r}")
    if not use_gpu and torch.cuda.is_available():
        logger.info("this machine has a GPU that will not be used: pass use_gpu=True to use it")
    return bool(use_gpu)


def gpu_elsewhere(resources: WorkerResources) -> bool:
    """Return whether a worker needs a GPU that this machine does not have."""
    return bool(resources.gpus) and not torch.cuda.is_available()


def completed(
    settings: TorchSettings,
    strategy: Strategy,
    resources: WorkerResources,
    elastic: ElasticConfig,
    *,
    remote: bool,
) -> TorchSettings:
    """Return the settings with what follows from the other arguments. Raise ConfigError for arguments that cannot be
    combined."""
    settings.options.check_with(
        num_workers=settings.num_workers, use_gpu=settings.use_gpu, precision=settings.precision, elastic=elastic
    )
    strategy.check(use_gpu=settings.use_gpu, precision=settings.precision)
    distributed = settings.num_workers > 1
    return replace(
        settings,
        distributed=distributed,
        threads=max(1, int(resources.cpus)) if remote else None,
        wrap_ddp=settings.options.parallel == "ddp" and strategy.wraps,
        batch=elastic.batch,
        snapshot_every=elastic.snapshot_every,
        rows=SharedRowReaders(uuid.uuid4().hex[:8]) if remote else local_row_reader,
        exchange=strategy.make_exchange if distributed else Exchange,
    )


def replica_factory(
    operator_cls: Any, config: dict[str, Any], settings: TorchSettings, on_workers: list[Any]
) -> TorchReplicaFactory:
    """Return the factory of replicas, which profile themselves if a callback wants that."""
    if not on_workers:
        return TorchReplicaFactory(operator_cls, config, settings)
    if len(on_workers) > 1 or not isinstance(on_workers[0], ProfilerSettings):
        raise ConfigError(
            f"one profiler callback is possible at a time, and nothing else on the workers, got {on_workers}"
        )
    return ProfiledReplicaFactory(operator_cls, config, settings, on_workers[0])


def opened(dataset: Any, group: Any) -> Any:
    """Return what `train(dataset=...)` sends to the workers. The rows of a Ray Dataset are read on the driver, and workers
    get a way to them."""
    if dataset is None or not RayData.is_given_as(dataset):
        return dataset
    data = RayData.of(dataset)
    return replace(data, dataset=group.rows(data.dataset))
