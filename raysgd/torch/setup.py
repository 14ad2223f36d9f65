"""From the arguments of a TorchTrainer to its config, resources and replicas. Driver."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn
from uuid import uuid4

import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from raysgd.callbacks.base import Callback
from raysgd.callbacks.callback_list import wanted_on_workers
from raysgd.callbacks.torch_profiler import ProfilerSettings
from raysgd.config import ElasticConfig, WorkerResources, at_least
from raysgd.constants import BATCH_SIZE
from raysgd.errors import ConfigError, shown
from raysgd.ray_data.columns import RayData
from raysgd.ray_data.reader import SharedRowReaders, local_row_reader
from raysgd.replica.settings import OperatorReplicaFactory
from raysgd.torch.options import TrainingOptions
from raysgd.torch.replica import TorchReplica
from raysgd.torch.settings import TorchSettings
from raysgd.trainer.arguments import needs_ray
from raysgd.trainer.auto_checkpoint import AutoCheckpoint, wanted_metrics
from raysgd.workers.cluster.connecting import gpus_for_workers

logger = logging.getLogger("raysgd")

IN_SETUP = "make it in the setup of a TrainingOperator subclass, or use TrainingOperator.from_creators(...)"
OTHER_ROWS = (
    "the checkpoint was saved with different rows in the {}, so rows that were trained on can be in the validation now. Divide the data "
    "in the same way in each run, for example with random_split(..., generator=torch.Generator().manual_seed(0))"
)
NO_CHECKPOINT = (
    "parallel='fsdp' needs a checkpoint: each worker has only a part of the model, so new ones load the newest when a worker fails, leaves "
    "or joins. Pass TorchTrainer(checkpoints=AutoCheckpoint(...)), or call load() before train()"
)
NOT_NAMED = (
    "a trainer with name= cannot read a Ray Dataset: the process that reads it ends with the script. Leave out the name, or pass a "
    "DataLoader"
)
# The trainer's arguments that are settings objects.
GROUPS = {"options": TrainingOptions, "elastic": ElasticConfig}
REMOVED = {
    "num_replicas": "use num_workers",
    "batch_size": "put it in config; config['*batch_size'] (raysgd.utils.BATCH_SIZE) is the batch of all workers together",
    "model_creator": IN_SETUP,
    "data_creator": IN_SETUP,
    "optimizer_creator": IN_SETUP,
    "scheduler_creator": IN_SETUP,
    "loss_creator": IN_SETUP,
    "data_loader_args": "pass them to the DataLoader you make in setup",
    "apex_args": "pass them to self.register(apex_args=...) in setup",
}
WITHOUT_EFFECT = {
    "use_local": "a single worker runs in this process, and of several none does; get_local_operator() returns an operator with the "
    "current state",
    "serialize_data_creation": "pass it to TrainingOperator.from_creators(...)",
}


def replica_factory(operator_cls: Any, config: dict[str, Any], settings: TorchSettings) -> OperatorReplicaFactory:
    """Make what makes the replicas. Each of them has its part of the batch size in its config. A
    batch size that the number of workers does not divide is rounded down in `config`, with a
    warning."""
    if BATCH_SIZE not in config:
        return OperatorReplicaFactory(TorchReplica, operator_cls, config, settings)
    total, workers = config[BATCH_SIZE], settings.num_workers
    each = total // workers
    config[BATCH_SIZE] = each * workers
    if config[BATCH_SIZE] != total:
        warnings.warn(
            f"config[{BATCH_SIZE!r}] is {total}, which num_workers={workers} does not divide: each worker uses {each}, "
            f"all together {config[BATCH_SIZE]}",
            stacklevel=4,
        )
    return OperatorReplicaFactory(TorchReplica, operator_cls, {**config, BATCH_SIZE: each}, settings)


@dataclass(frozen=True)
class PlannedWorkers:
    """What each worker reserves in the cluster, and the settings of its process."""

    resources: WorkerResources
    process_settings: dict[str, Any]

    @property
    def use_gpu(self) -> bool:
        return self.resources.gpus > 0


def plan_workers(
    is_distributed: bool, name: str | None, use_ray: bool | None, num_cpus: Any, use_gpu: Any, resources: Any
) -> PlannedWorkers:
    """Decide what workers reserve, and where they run. Unless it is a process of Ray, the only
    worker runs in this process."""
    named = name is not None
    parsed = worker_resources(num_cpus, use_gpu, resources, True if is_distributed or named else use_ray)
    on_gpu = parsed.gpus > 0
    missing_gpu = on_gpu and not torch.cuda.is_available()  # it may be on another machine
    remote = needs_ray(use_ray, is_distributed, parsed, elsewhere=missing_gpu or named)
    rows = no_rows if named else SharedRowReaders(uuid4().hex[:8]) if remote else local_row_reader
    threads, dtype = max(1, int(parsed.cpus)) if remote else None, torch.get_default_dtype()
    return PlannedWorkers(parsed, {"use_gpu": on_gpu, "threads": threads, "rows": rows, "dtype": dtype})


def worker_resources(num_cpus: Any, use_gpu: Any, resources: Any, in_ray: bool | None = True) -> WorkerResources:
    """Decide what each worker reserves. Unless it is a process `in_ray`, the only worker runs in
    this process; None: if that has what it needs."""
    chosen = isinstance(resources, Mapping) and "GPU" in resources
    wanted = False if chosen and use_gpu == "auto" else wants_gpu(use_gpu, in_ray=in_ray)
    asked = None if use_gpu == "auto" else wanted
    return WorkerResources.parse(num_cpus, wanted, resources, gpu_asked=asked)


def wants_gpu(use_gpu: Any, *, in_ray: bool | None = True) -> bool:
    """Whether workers train on GPUs; "auto" means that they do if the cluster in which they will
    run has one, or this machine, if it does not have to be asked, or is not there yet."""
    if use_gpu == "auto":
        return _is_gpu_there(in_ray)
    if not isinstance(use_gpu, bool):
        raise ConfigError(f"use_gpu must be True, False or 'auto', got {use_gpu!r}")
    if not use_gpu and torch.cuda.is_available():
        logger.info("this machine has a GPU that will not be used: pass use_gpu=True to use it")
    return bool(use_gpu)


def _is_gpu_there(in_ray: bool | None) -> bool:
    here = bool(torch.cuda.is_available())
    in_this_process = in_ray is False or (in_ray is None and here)
    gpus = None if in_this_process else gpus_for_workers(join=bool(in_ray))
    if gpus is None or bool(gpus) == here:
        return here
    if here:
        logger.warning("use_gpu='auto': this machine has a GPU, but the Ray cluster has none, so training uses CPUs")
    else:
        logger.warning(
            "use_gpu='auto': this machine has no GPU, but the Ray cluster has %g, so each worker gets one; use_gpu=False trains on CPUs",
            gpus,
        )
    return bool(gpus)


def wanted_by(callbacks: Sequence[Callback], checkpoints: AutoCheckpoint | None) -> dict[str, Any]:
    """The settings that make the replicas do what callbacks want of workers."""
    profilers = wanted_on_workers(callbacks)
    if len(profilers) > 1 or not all(isinstance(each, ProfilerSettings) for each in profilers):
        raise ConfigError(
            f"callbacks can have one TorchProfilerCallback, and no on_workers of their own, got {profilers}"
        )
    return {"profiler": next(iter(profilers), None), "wanted": wanted_metrics(callbacks, checkpoints)}


def check_predicted(data: Any, batch_size: Any) -> None:
    """Raise ConfigError for data whose outputs would have no defined order."""
    at_least("batch_size", batch_size, 1, whole=True)
    data_set = data.dataset if isinstance(data, DataLoader) else data
    if isinstance(data_set, IterableDataset) or not (hasattr(data_set, "__getitem__") and hasattr(data_set, "__len__")):
        raise ConfigError(
            f"predict() needs data with an order: a data set with __getitem__ and __len__, or a DataLoader of one, got {data!r}"
        )
    if isinstance(data, DataLoader) and _shuffles(getattr(data.batch_sampler, "sampler", data.sampler)):
        raise ConfigError(
            "predict() returns outputs in the order of the data, but this loader shuffles: pass shuffle=False, and no sampler that "
            "draws a random order"
        )


def _shuffles(sampler: Any) -> bool:
    """Whether this is one of torch's samplers that draw a random order."""
    if isinstance(sampler, DistributedSampler):
        return sampler.shuffle
    return isinstance(sampler, (RandomSampler, SubsetRandomSampler, WeightedRandomSampler))


def no_rows(*_: Any) -> NoReturn:
    """Refuse a Ray Dataset that a worker has made."""
    raise ConfigError(NOT_NAMED)


def opened(dataset: Any, group: Any) -> Any:
    """What `train(dataset=...)` sends to the workers. The rows of a Ray Dataset are read on the
    driver, and workers get a way to them."""
    if dataset is None:
        return None
    if not RayData.is_given_as(dataset):
        raise ConfigError(
            f"dataset must be a Ray Dataset, got {shown(dataset)}: pass one, or register loaders and other iterables in setup with "
            "self.register_data(train_loader=...)"
        )
    if group.term:  # of a trainer with a name
        no_rows()
    data = RayData.of(dataset)
    return replace(data, dataset=group.rows(data.dataset))
