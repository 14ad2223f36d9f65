"""From a trainer's arguments to its engine: checked, resolved once, and put together."""

from __future__ import annotations

import logging
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from raysgd.callbacks.base import Run
from raysgd.callbacks.folder import folder_to_be
from raysgd.callbacks.torch_profiler import ProfilerSettings
from raysgd.config import ElasticConfig, Limits, WorkerResources, check_trainer, start_limit_s
from raysgd.core.protocols import Backend
from raysgd.core.ranks import SingleWorkerBackend
from raysgd.engine.engine import Engine
from raysgd.errors import ConfigError
from raysgd.ray_data.columns import RayData
from raysgd.ray_data.reader import SharedRowReaders, local_row_reader
from raysgd.torch import arguments, strategies
from raysgd.torch.exchange import Exchange
from raysgd.torch.operator import TrainingOperator
from raysgd.torch.options import TrainingOptions
from raysgd.torch.profiling import ProfiledReplicaFactory
from raysgd.torch.replica import TorchReplicaFactory
from raysgd.torch.settings import ReplicaSettings
from raysgd.torch.strategies import Strategy
from raysgd.training.call_runner import CallRunner
from raysgd.workers.inline_group import InlineGroup

__all__ = ["Plan", "TrainerArguments", "engine", "opened", "plan", "wants_gpu"]

logger = logging.getLogger("raysgd")


@dataclass(frozen=True, kw_only=True)
class TrainerArguments:
    """What the user passed to `TorchTrainer`, as it came; `more` are options by name, and names that are gone."""

    training_operator_cls: Any
    initialization_hook: Any
    config: Any
    num_workers: Any
    num_cpus_per_worker: Any
    resources_per_worker: Any
    use_gpu: Any
    backend: Any
    wrap_ddp: Any
    timeout_s: Any
    use_fp16: Any
    precision: Any
    use_tqdm: Any
    add_dist_sampler: Any
    scheduler_step_freq: Any
    use_local: Any
    use_ray: Any
    elastic: Any
    callbacks: Any
    logdir: Any
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything decided: `config` is what the trainer shows, `remote` whether Ray is needed, `calls` who listens."""

    config: dict[str, Any]
    use_gpu: bool
    num_workers: int
    factory: TorchReplicaFactory
    hook: Callable[[], Any] | None
    resources: WorkerResources
    elastic: ElasticConfig
    limits: Limits
    strategy: Strategy
    remote: bool
    rejoins: bool
    calls: CallRunner


def plan(given: TrainerArguments) -> Plan:
    """Checks every argument, in words that say what to do; starts nothing."""
    horovod_args, more = _without(given.more, "horovod_args")
    options, removed = TrainingOptions.taken_from(more, wrap_ddp=given.wrap_ddp)
    arguments.refuse_removed(removed)
    _check(given)
    shown, worker_config = arguments.per_worker_config(given.config, given.num_workers)
    resources, use_gpu = _resources(given)
    elastic = given.elastic or ElasticConfig()
    remote = _needs_ray(given.use_ray, given.num_workers, resources)
    strategy = strategies.choose_strategy(arguments.check_backend(given.backend, use_gpu), options, horovod_args)
    settings = _settings(
        given, options, elastic, use_gpu, strategy, threads=max(1, int(resources.cpus)) if remote else None
    )
    options.check_with(num_workers=given.num_workers, use_gpu=use_gpu, precision=settings.precision, elastic=elastic)
    strategy.check(use_gpu=use_gpu, precision=settings.precision)
    rejoins = options.parallel != "fsdp"  # a shard that is lost is nowhere else: only a snapshot has it
    calls = _calls(given, shown)
    return Plan(
        config=shown,
        use_gpu=use_gpu,
        num_workers=given.num_workers,
        factory=_factory(given.training_operator_cls, worker_config, settings, calls.on_workers),
        hook=given.initialization_hook,
        resources=resources,
        elastic=elastic if rejoins else replace(elastic, grow=False),
        limits=Limits.derive(
            timeout_s=given.timeout_s,
            hang_timeout_s=elastic.hang_timeout_s,
            start_s=start_limit_s(),
        ),
        strategy=strategy,
        remote=remote,
        rejoins=rejoins,
        calls=calls,
    )


def _calls(given: TrainerArguments, config: dict[str, Any]) -> CallRunner:
    name = given.training_operator_cls.__name__
    run = Run(
        trainer="TorchTrainer",
        name=name,
        num_workers=given.num_workers,
        config=config,
        folder=folder_to_be(given.logdir, name),
    )
    return CallRunner(given.callbacks, run, bar=given.use_tqdm)


def _factory(
    operator_cls: Any, config: dict[str, Any], settings: ReplicaSettings, on_workers: list[Any]
) -> TorchReplicaFactory:
    """With a profiler, where a callback wants one."""
    if not on_workers:
        return TorchReplicaFactory(operator_cls, config, settings)
    if len(on_workers) > 1 or not isinstance(on_workers[0], ProfilerSettings):
        raise ConfigError(
            f"one profiler callback is possible at a time, and nothing else on the workers, got {on_workers}"
        )
    return ProfiledReplicaFactory(operator_cls, config, settings, on_workers[0])


def engine(plan: Plan) -> Engine:
    """Puts the parts together; connects to Ray, or starts it, where the plan needs it. Launches no worker yet."""
    backend: Backend = _backend(plan) if plan.num_workers > 1 else SingleWorkerBackend()
    group: Any = _ray_group(backend, plan.resources) if plan.remote else InlineGroup(backend)
    return Engine(
        group,
        backend,
        plan.factory,
        hook=plan.hook,
        target=plan.num_workers,
        elastic=plan.elastic,
        limits=plan.limits,
        on_progress=plan.calls.on_progress,
        on_recovery=plan.calls.on_recovery,
    )


def _check(given: TrainerArguments) -> None:
    arguments.check_operator(given.training_operator_cls, TrainingOperator)
    arguments.check_num_workers(given.num_workers)
    arguments.check_scheduler_step(given.scheduler_step_freq)
    check_trainer(given.initialization_hook, given.timeout_s, given.elastic)
    elastic = given.elastic
    if elastic is not None and elastic.min_workers > given.num_workers:
        raise ConfigError(
            f"elastic.min_workers is {elastic.min_workers}, but num_workers is {given.num_workers}: it can be that at most"
        )
    if given.use_local and given.num_workers > 1:
        warnings.warn(
            "use_local=True with several workers: no rank lives in the driver any more; get_local_operator() gives "
            "an operator made here that holds the current state",
            stacklevel=4,
        )


def _resources(given: TrainerArguments) -> tuple[WorkerResources, bool]:
    """What a worker asks of the cluster, and whether it trains on a GPU."""
    wanted = wants_gpu(given.use_gpu)
    asked = None if given.use_gpu == "auto" else bool(given.use_gpu)
    resources = WorkerResources.parse(given.num_cpus_per_worker, wanted, given.resources_per_worker, gpu_asked=asked)
    return resources, wanted or resources.gpus > 0


def _settings(
    given: TrainerArguments,
    options: TrainingOptions,
    elastic: ElasticConfig,
    use_gpu: bool,
    strategy: Strategy,
    *,
    threads: int | None,
) -> ReplicaSettings:
    return ReplicaSettings(
        distributed=given.num_workers > 1,
        use_gpu=use_gpu,
        wrap_ddp=options.parallel == "ddp" and strategy.wraps,
        add_dist_sampler=given.add_dist_sampler,
        scheduler_step_freq=given.scheduler_step_freq,
        use_tqdm=given.use_tqdm,
        precision=arguments.resolve_precision(given.precision, given.use_fp16),
        use_fp16=given.use_fp16 or given.precision in ("fp16", "apex"),
        num_workers=given.num_workers,
        threads=threads,
        batch=elastic.batch,
        snapshot_every=elastic.snapshot_every,
        rows=local_row_reader if threads is None else SharedRowReaders(uuid.uuid4().hex[:8]),
        options=options,
        exchange=strategy.make_exchange if given.num_workers > 1 else Exchange,
    )


def _without(given: dict[str, Any], name: str) -> tuple[Any, dict[str, Any]]:
    return given.get(name), {other: value for other, value in given.items() if other != name}


def opened(dataset: Any, group: Any) -> Any:
    """What `train(dataset=...)` sends to the workers: of a Ray Dataset only the way to its rows, which are read here."""
    if dataset is None or not RayData.is_given_as(dataset):
        return dataset
    data = RayData.of(dataset)
    return replace(data, dataset=group.rows(data.dataset))


def wants_gpu(use_gpu: Any) -> bool:
    if use_gpu == "auto":
        return bool(torch.cuda.is_available())
    if not isinstance(use_gpu, bool):
        raise ConfigError(f"use_gpu must be True, False or 'auto', got {use_gpu!r}")
    if not use_gpu and torch.cuda.is_available():
        logger.info("this machine has a GPU that will not be used: pass use_gpu=True to use it")
    return bool(use_gpu)


def _needs_ray(use_ray: bool | None, num_workers: int, resources: WorkerResources) -> bool:
    """One worker runs in this process, unless Ray is asked for or must find what the worker needs elsewhere."""
    if num_workers > 1 or resources.custom or (resources.gpus and not torch.cuda.is_available()):
        if use_ray is False:
            raise ConfigError("use_ray=False is possible with num_workers=1 and without custom resources only")
        return True
    return bool(use_ray)


def _backend(plan: Plan) -> Backend:
    from raysgd.workers.cluster import driver_address, ensure_cluster

    ensure_cluster()
    return plan.strategy.make_backend(
        host=driver_address(),
        join_s=plan.limits.join_s,
        collective_s=plan.limits.collective_s,
        in_place=plan.rejoins,
    )


def _ray_group(backend: Backend, resources: WorkerResources) -> Any:
    from raysgd.workers.ray_group import RayGroup

    return RayGroup(backend, resources)
