"""A trainer's run, as the arguments of its constructor describe it, and its engine. Driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from raysgd.callbacks.base import Callback, Run
from raysgd.config import Limits, WorkerResources
from raysgd.core.protocols import ProcessGroupBackend, SingleWorkerBackend
from raysgd.core.snapshot import Snapshot
from raysgd.engine.engine import Engine
from raysgd.environment import start_limit_s
from raysgd.errors import ConfigError
from raysgd.replica.calls import notice_preemption
from raysgd.replica.operator_base import OperatorBase
from raysgd.replica.settings import OperatorReplicaFactory, ReplicaSettings
from raysgd.storage.log_folders import folder_to_be
from raysgd.trainer.auto_checkpoint import CheckpointFolder
from raysgd.trainer.call_runner import CallRunner
from raysgd.trainer.named import NamedCalls
from raysgd.workers.inline_group import InlineGroup
from raysgd.workers.serialization import pack


class GivenConfig(dict[str, Any]):
    """The config as the trainer shows it. The workers have copies, so a change would have no
    effect."""

    def _refuse(self, *arguments: Any, **named: Any) -> NoReturn:
        raise ConfigError(
            "trainer.config cannot be changed: the workers have got a copy. Change what setup has made of it with "
            "trainer.apply_all_operators(f), or pass another config to a new trainer"
        )

    __setitem__ = __delitem__ = __ior__ = update = pop = popitem = clear = setdefault = _refuse

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


@dataclass(frozen=True, kw_only=True)
class RunDescription:
    """What a trainer runs, and where.

    trainer       the name of its class
    factory       makes the replicas; its settings have `num_workers`, `elastic` and `seed`
    config        the config as the trainer shows it
    resources     what each worker reserves
    timeout_s     the trainer's `timeout_s`
    make_backend  makes the backend of several workers, from the driver's address as `host` and its
                  limits, `join_s` and `collective_s`
    hook          called first in every worker process
    saved         where no worker has the whole state: the engine's `saved`
    callbacks     the callbacks of the user
    logdir        where callbacks write
    folder        the folder of the automatic checkpoints
    named         the trainer's name, and how many seconds its workers wait for the next script
    """

    trainer: str
    factory: OperatorReplicaFactory
    config: dict[str, Any]
    resources: WorkerResources
    timeout_s: float
    make_backend: Callable[..., ProcessGroupBackend]
    hook: Callable[[], Any] | None
    saved: Callable[[bool], Snapshot | None] | None = None
    callbacks: Sequence[Callback]
    logdir: Any
    folder: CheckpointFolder | None
    named: tuple[str, float] | None

    @property
    def settings(self) -> ReplicaSettings:
        settings: ReplicaSettings = self.factory.settings
        return settings

    @property
    def limits(self) -> Limits:
        hang_s = self.settings.elastic.hang_timeout_s
        return Limits.derive(timeout_s=self.timeout_s, hang_timeout_s=hang_s, start_s=start_limit_s())


def build(described: RunDescription) -> tuple[Engine, CallRunner]:
    """Make the engine, which starts its workers with the first call, and what makes the calls."""
    settings, name = described.settings, described.factory.operator_cls.__name__
    run = Run(
        trainer=described.trainer,
        name=name,
        num_workers=settings.num_workers,
        config=described.config,
        folder=folder_to_be(described.logdir, name),
    )
    kind: Callable[..., CallRunner] = CallRunner if described.named is None else partial(NamedCalls, described.factory)
    calls = kind(described.callbacks, run, bar=settings.use_tqdm, seed=settings.seed)
    return make_engine(described, calls), calls


def make_engine(described: RunDescription, calls: CallRunner) -> Engine:
    """Make the engine. If there can be several workers, connect to Ray, or start it."""
    factory, settings, named, limits = described.factory, described.settings, described.named, described.limits
    if (spares := settings.elastic.hot_spares) and settings.threads is None:
        raise ConfigError(
            f"hot_spares={spares} cannot replace a worker that is this process: pass num_workers=2 or more, or "
            "use_ray=True"
        )
    listens = factory.operator_cls.on_preemption_notice is not OperatorBase.on_preemption_notice
    backend: ProcessGroupBackend = SingleWorkerBackend()
    if settings.distributed or named is not None:
        from raysgd.workers.cluster.connecting import ensure_cluster
        from raysgd.workers.cluster.nodes import driver_address

        ensure_cluster(described.resources, lasting=named is not None)
        if settings.distributed:
            limited = {"join_s": limits.join_s, "collective_s": limits.collective_s}
            backend = described.make_backend(host=driver_address(), **limited)
    group: Any = InlineGroup(backend)
    sent: tuple[Any, Any] = factory, described.hook
    if settings.threads is not None:  # of a process of its own
        from raysgd.workers.ray_group import RayGroup

        sent = pack(factory), pack(described.hook)  # before there is a group, which an error here would leave open
        tenure = calls.take_lease(*named) if isinstance(calls, NamedCalls) and named is not None else None
        group = RayGroup(backend, described.resources, unreachable_s=limits.unreachable_s, tenure=tenure)
    return Engine(
        group,
        backend,
        sent[0],
        hook=sent[1],
        notice=notice_preemption if listens else None,
        target=settings.num_workers,
        elastic=settings.elastic,
        limits=limits,
        saved=described.saved,
        on_progress=calls.on_progress,
        on_recovery=calls.on_recovery,
        on_wait=calls.on_wait,
    )
