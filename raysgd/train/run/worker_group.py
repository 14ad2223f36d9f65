"""Worker processes that run functions: on all, or on one of them. Calls a backend's hooks.
Driver."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raysgd.config import ElasticConfig, Limits, WorkerResources, at_least
from raysgd.core.decisions.policy import PLANNED
from raysgd.core.protocols import Call, SingleWorkerBackend
from raysgd.engine.call import Job
from raysgd.engine.engine import Engine
from raysgd.environment import FUNCTION_START_LIMIT, seconds_from_environment, start_limit_s
from raysgd.errors import ConfigError, TrainingFailedError
from raysgd.train.backends import Backend, BackendConfig
from raysgd.train.errors import InactiveWorkerGroupError, TrainingWorkerError
from raysgd.train.replica import FunctionReplica
from raysgd.train.sessions import Codec
from raysgd.train.settings import HANG_S
from raysgd.workers.ray_group import RayGroup
from raysgd.workers.serialization import dumps, pack, pickler_class

PATIENCE_S = 5.0
JOIN_S = 60.0


def limits_for(*, collective_s: float = HANG_S, hang_s: float = HANG_S) -> Limits:
    """The limits for functions."""
    start_s = float(seconds_from_environment(FUNCTION_START_LIMIT, int(start_limit_s())))
    return Limits(start_s=start_s, setup_s=hang_s, join_s=JOIN_S, collective_s=collective_s, hang_s=hang_s)


def check_resources(num_workers: Any, cpus: Any, gpus: Any, additional: Any) -> WorkerResources:
    """Check one worker's resources. Raise ConfigError for invalid ones, or an invalid number."""
    at_least("num_workers", num_workers, 1, whole=True)
    wanted = {**dict(additional or {}), "GPU": gpus}
    return WorkerResources.parse(cpus, bool(gpus), wanted)


def make_factory(backend: Backend, kind: type | None, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    """Pack what creates the replica of each worker, with an object of the class `kind` if there is
    one."""
    make = None if kind is None else functools.partial(kind, *args, **(kwargs or {}))
    codec = Codec(dumps, pickler_class, backend.encode_data, backend.decode_data)
    return pack(functools.partial(FunctionReplica, codec, make))


class WorkersChanged(TrainingWorkerError):
    """Ends a backend's hook in which workers have failed. It is called again."""


class WorkerGroup:
    """A group of workers, which its constructor starts. The hooks of a backend receive that of a
    trainer.

        group = WorkerGroup(num_workers=2)
        group.execute(os.getpid)
        group.shutdown()

    num_workers                      how many workers
    num_cpus_per_worker              CPUs that each reserves
    num_gpus_per_worker              GPUs that each reserves
    additional_resources_per_worker  other Ray resources that each reserves
    actor_cls                        a class of which each worker creates an object, for
                                     `execute_object`
    actor_cls_args                   the positional arguments for it
    actor_cls_kwargs                 the keyword arguments for it
    placement_group                  none: raysgd requests the resources of each worker separately
    """

    def __init__(
        self,
        num_workers: int = 1,
        num_cpus_per_worker: float = 1,
        num_gpus_per_worker: float = 0,
        additional_resources_per_worker: Mapping[str, float] | None = None,
        actor_cls: type | None = None,
        actor_cls_args: Sequence[Any] = (),
        actor_cls_kwargs: Mapping[str, Any] | None = None,
        placement_group: Any = None,
    ) -> None:
        if placement_group not in (None, "default"):
            raise ConfigError(
                f"WorkerGroup cannot use the placement group {placement_group!r}, because raysgd requests each worker's "
                "resources separately, so that workers can be replaced: leave out placement_group"
            )
        self._resources = check_resources(
            num_workers, num_cpus_per_worker, num_gpus_per_worker, additional_resources_per_worker
        )
        self._count = num_workers
        self._factory = make_factory(Backend(), actor_cls, actor_cls_args, actor_cls_kwargs)
        self._has_object = actor_cls is not None
        self._engine: Engine | None = None
        self._guard: Callable[[], None] = lambda: None
        self._max_failures: Callable[[], int] = int
        self.start()

    @classmethod
    def of(
        cls,
        engine: Engine,
        *,
        has_object: bool = False,
        guard: Callable[[], None],
        max_failures: Callable[[], int] = int,
    ) -> WorkerGroup:
        """Make the worker group of a running engine. `guard` raises an error while a function is
        running. `max_failures` returns how many worker failures a call may have before the engine
        gives up; the call then raises WorkersChanged."""
        group = cls.__new__(cls)
        group._engine, group._has_object = engine, has_object
        group._guard, group._max_failures = guard, max_failures
        return group

    def start(self) -> None:
        """Start the workers again after `shutdown`; the constructor has started them once."""
        if self._engine is not None:
            raise InactiveWorkerGroupError("this worker group was started already: call shutdown() first")
        limits = limits_for()  # checks environment variables, so call it before the group opens a port
        backend = SingleWorkerBackend()
        engine = Engine(
            RayGroup(backend, self._resources, unreachable_s=limits.unreachable_s),
            backend,
            self._factory,
            target=self._count,
            elastic=ElasticConfig(grow=False),
            limits=limits,
        )
        engine.start()
        self._engine = engine

    def shutdown(self, patience_s: float = PATIENCE_S) -> None:
        """End the workers after they have closed what they host; with `patience_s=0`, at once."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.stop(force=patience_s <= 0)

    def __len__(self) -> int:
        if self._engine is None:
            return 0
        return self._engine.world_size

    @property
    def _active(self) -> Engine:
        if self._engine is None:
            raise InactiveWorkerGroupError("this worker group is not active: call start() first, or create a new one")
        self._guard()
        return self._engine

    # -- calls ----------------------------------------------------------------------------------------

    def execute(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call `func(*args, **kwargs)` on every worker. Return the values in rank order."""
        return self._call(func, args, kwargs, None)

    def execute_single(self, worker_index: int, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `func(*args, **kwargs)` on the rank `worker_index`. Return its value."""
        if not isinstance(worker_index, int) or not 0 <= worker_index < len(self):
            raise ConfigError(f"worker_index must be a rank from 0 to {len(self) - 1}, got {worker_index!r}")
        return self._call(func, args, kwargs, worker_index)[worker_index]

    def execute_object(self, func: Callable[..., Any], args: Any, kwargs: Any, only: int | None = None) -> list[Any]:
        """Collect what `func(obj, *args, **kwargs)` returns on all workers, or on `only` one."""
        if not self._has_object:
            raise ConfigError(
                "execute() calls a function with an object in each worker, and there is none: pass its class to "
                "start(train_cls=...). To call a plain function on the workers, use run() or worker_group.execute()"
            )

        def call(instance: Any) -> Any:
            return func(instance, *args, **kwargs)

        return self._call(call, (), {}, only, method=FunctionReplica.apply_object)

    def _call(
        self,
        func: Callable[..., Any],
        args: Any,
        kwargs: Any,
        only: int | None,
        method: Callable[..., Any] = FunctionReplica.apply,
    ) -> list[Any]:
        if not callable(func):
            raise ConfigError(f"the first argument must be a function, got {func!r}")
        engine = self._active
        bound = functools.partial(func, *args, **kwargs) if args or kwargs else func
        call = Call(method, {"function": pack(bound), "only": only})
        max_failures, generation = self._max_failures(), engine.generation
        try:
            outcomes = engine.calls.run(Job(call, again="keep", max_failures=max_failures))[-1].outcomes
        except TrainingFailedError as error:
            raise TrainingWorkerError(str(error)) from error
        if max_failures and engine.generation != generation:
            raise WorkersChanged("workers have failed during this call: the backend's hook is called again")
        return [outcome.value for outcome in outcomes if hasattr(outcome, "value")]


class StartedWorkers:
    """Owns the engine of a trainer from `start` to `shutdown`, and `group`, which is the user's.
    Calls a backend's hooks, once for each generation of the workers. They get another group, which
    no worker failure ends."""

    def __init__(
        self, engine: Engine, group: WorkerGroup, backend: Backend, config: BackendConfig, for_hooks: WorkerGroup
    ) -> None:
        self.engine, self.group = engine, group
        self._backend, self._config, self._for_hooks = backend, config, for_hooks
        self._called_for = -1  # the generation
        self._recoveries = 0  # before it

    def call_hooks(self) -> None:
        """Call the hooks for a new generation, again if it changes meanwhile."""
        engine = self.engine
        while self._called_for != engine.generation:
            first, self._called_for = self._called_for < 0, engine.generation
            changes = engine.recoveries[self._recoveries :]
            self._recoveries = len(engine.recoveries)
            failed = sorted(
                {rank for change in changes if change.reason not in PLANNED for rank in change.removed_ranks}
            )
            with contextlib.suppress(WorkersChanged):
                if failed and not first:
                    self._backend.handle_failure(self._for_hooks, failed, self._config)
                else:
                    self._backend.on_start(self._for_hooks, self._config)

    def begin_training(self) -> None:
        """Call the hooks before the function begins, again if a worker fails in one."""
        prepared = -1
        while prepared != self.engine.generation:
            self.call_hooks()
            prepared = self.engine.generation
            with contextlib.suppress(WorkersChanged):
                self._backend.on_training_start(self._for_hooks, self._config)
