"""Runs training functions on the engine: sends the newest checkpoint, and receives the reports.
Driver.

    start_training(fn)
        a thread asks the engine to run fn on every worker; before each attempt:
            the backend's hooks are called, if the workers have changed
            fn gets the newest checkpoint
    fetch_next_result()  -> what every rank reported in the next round, None when the function has ended
    finish_training()    -> what every rank returned
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import pickle
import queue
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from raysgd.config import ElasticConfig, WorkerResources, refuse_comparison, refuse_rates
from raysgd.core.messages import FunctionReport
from raysgd.core.policy import PLANNED, Recovery
from raysgd.core.protocols import Call
from raysgd.engine.call import Job
from raysgd.engine.call_lock import CallLock, Claim
from raysgd.engine.engine import Engine
from raysgd.errors import TrainingFailedError
from raysgd.storage.locations import Place, place
from raysgd.train.backends import Backend, BackendConfig, backend_of
from raysgd.train.checkpoint import Checkpoint, is_directory
from raysgd.train.checkpoint_manager import CheckpointManager, RunCheckpoints
from raysgd.train.errors import (
    InactiveWorkerGroupError,
    TrainBackendError,
    TrainingRunningError,
    TrainingWorkerError,
)
from raysgd.train.replica import FunctionReplica, FunctionReplicaFactory
from raysgd.train.run import FunctionRun, RoundResult, RunOptions, check_function, function_name, payload_of
from raysgd.train.session_functions import Codec, TrainingResultType
from raysgd.train.settings import HANG_S, CheckpointConfig, check_failure_limit, check_strategy
from raysgd.train.worker_group import WorkerGroup, WorkersChanged, check_resources, limits_for
from raysgd.workers.calls import Blob
from raysgd.workers.cluster import driver_address, ensure_cluster
from raysgd.workers.ray_group import RayGroup
from raysgd.workers.serialization import dumps, pack

logger = logging.getLogger("raysgd")

BEFORE_FIRST = -1  # fit() and trials count checkpoints from 0
POLL_S = 0.5
STOP_S = 30.0
# For a planned change: only the ranks that save checkpoints stop at the boundary, and the others wait for them.
HURRY_S = 2.0


class BackendExecutor(RunCheckpoints):
    """Owns the engine, the backend's hooks and the current run. `Trainer` adds a log directory and
    callbacks.

    backend_config                   a `BackendConfig`
    num_workers                      the largest number of workers
    num_cpus_per_worker              CPUs that each reserves
    num_gpus_per_worker              GPUs that each reserves
    additional_resources_per_worker  other Ray resources that each reserves
    max_retries                      how many worker failures a run survives (-1: any number)
    elastic                          an `ElasticConfig`
    start_with                       how many workers are enough to start; by default all
    """

    def __init__(
        self,
        backend_config: BackendConfig,
        num_workers: int = 1,
        num_cpus_per_worker: float = 1,
        num_gpus_per_worker: float = 0,
        additional_resources_per_worker: Mapping[str, float] | None = None,
        max_retries: int = 3,
        *,
        elastic: ElasticConfig | None = None,
        start_with: int | None = None,
    ) -> None:
        self._config, self._backend = backend_config, backend_of(backend_config)
        self._count, self._least = num_workers, start_with
        self._resources = check_resources(
            num_workers, num_cpus_per_worker, num_gpus_per_worker, additional_resources_per_worker
        )
        check_failure_limit("max_retries", max_retries)
        self._max_retries = max_retries
        self._elastic = elastic or ElasticConfig(hang_timeout_s=HANG_S)
        refuse_rates(self._elastic, "a training function owns its optimizers")
        refuse_comparison(self._elastic, "a training function owns its models, so nothing else knows them")
        self._engine: Engine | None = None
        self._group: WorkerGroup | None = None
        self._hooks_group: WorkerGroup | None = None  # for the backend's hooks, which a worker failure does not end
        self._recoveries_before = 0
        self._rounds_before: list[int] = []  # for each recovery
        self._numbers = itertools.count(1)
        self._run: FunctionRun | None = None
        self._thread: threading.Thread | None = None
        self._starting = CallLock()
        self._running: Claim | None = None

    # -- life -----------------------------------------------------------------------------------------

    def start(
        self,
        initialization_hook: Callable[[], Any] | None = None,
        train_cls: type | None = None,
        train_cls_args: tuple[Any, ...] = (),
        train_cls_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the workers, and call the `initialization_hook` once in each of them. Each creates
        an object of `train_cls` with `train_cls_args` and `train_cls_kwargs`."""
        if self._engine is not None:
            raise TrainBackendError("the workers were started already: call shutdown() before you start them again")
        ensure_cluster(self._resources)
        hang_s, self._rounds_before = self._elastic.hang_timeout_s, []
        limits = limits_for(collective_s=min(self._config.collective_timeout_s, 0.9 * hang_s), hang_s=hang_s)
        backend = self._config.make_backend(
            host=driver_address(),
            gpus=self._resources.gpus,
            join_s=limits.join_s,
            collective_s=limits.collective_s,
        )
        make = None if train_cls is None else functools.partial(train_cls, *train_cls_args, **(train_cls_kwargs or {}))
        codec = Codec(dumps, self._backend.encode_data, self._backend.decode_data)
        factory, hook = pack(FunctionReplicaFactory(codec, make)), pack(initialization_hook)
        engine = Engine(
            RayGroup(backend, self._resources, unreachable_s=limits.unreachable_s),
            backend,
            factory,
            hook=hook,
            target=self._count,
            least=self._least,
            elastic=self._elastic,
            limits=limits,
            on_report=self._on_report,
            on_recovery=self._on_recovery,
        )
        engine.start()
        self._engine = engine
        self._hooks_called_for, self._seen_recoveries = -1, 0  # the generation, and its recoveries
        has_object = train_cls is not None
        self._group = WorkerGroup.of(engine, has_object=has_object, guard=self._check_free)
        self._hooks_group = WorkerGroup.of(
            engine, has_object=has_object, guard=self._check_free, max_failures=self._failures_left
        )
        try:
            self._call_hooks()
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """End the current run, if there is one, and the workers."""
        engine, self._engine = self._engine, None
        if engine is None:
            return
        try:
            self._stop_run(engine, InactiveWorkerGroupError("the workers were shut down while the function ran"))
            try:
                self._backend.on_shutdown(self._group, self._config)
            except Exception as error:
                logger.warning("%s.on_shutdown failed: %s", type(self._backend).__name__, error)
        finally:
            self._group = self._hooks_group = None
            engine.stop()

    @property
    def is_started(self) -> bool:
        return self._engine is not None

    @property
    def is_running(self) -> bool:
        """Return whether a function is running."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def worker_group(self) -> WorkerGroup:
        self._active()
        assert self._group is not None
        return self._group

    @property
    def recoveries(self) -> list[Recovery]:
        """Return all recoveries so far: failures, growth, preemptions."""
        return self._active().recoveries

    @property
    def recoveries_of_run(self) -> list[Recovery]:
        """Return the recoveries since the newest run began, each with the number of rounds before
        it as its step."""
        counted = [
            replace(each, step=rounds) for each, rounds in zip(self.recoveries, self._rounds_before, strict=False)
        ]
        return counted[self._recoveries_before :]

    @property
    def world_size(self) -> int:
        return self._active().world_size

    def processes(self) -> list[tuple[str, int]]:
        """Return the machine and the process id of each rank."""
        engine = self._engine
        return engine.processes() if engine is not None else []

    def _active(self) -> Engine:
        if self._engine is None:
            raise InactiveWorkerGroupError(
                "the workers are not active: call start() first (after shutdown(), start() creates new ones)"
            )
        return self._engine

    # -- runs -----------------------------------------------------------------------------------------

    def start_training(
        self,
        train_func: Callable[..., Any],
        run_dir: str | Place | None = None,
        checkpoint: Any = None,
        checkpoint_strategy: CheckpointConfig | None = None,
        latest_checkpoint_id: int | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
        manager: CheckpointManager | None = None,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the function on every worker, and return at once. Without a `run_dir`, checkpoints
        are only kept in memory. A `manager` replaces the arguments for checkpoints. `ready` is
        called after all checks, right before the function begins."""
        engine = self._active()
        task = check_function(train_func, config)
        check_strategy(checkpoint_strategy)
        name = function_name(train_func)
        with (claim := self._starting.claim(f"the function {name!r}")):
            self._check_free()
            manager = manager or CheckpointManager(
                place(run_dir or tempfile.gettempdir()) / "checkpoints",
                checkpoint_strategy if run_dir is not None else CheckpointConfig(num_to_keep=0),
                latest_id=latest_checkpoint_id or 0,
                initial=payload_of(checkpoint, dumps),
            )
            manager.check_storage()
            packed = pack(task)
            self._recoveries_before = len(engine.recoveries)
            ready()
            self._run = run = FunctionRun(
                next(self._numbers),
                manager,
                fail=engine.cancel,
                decode=self._backend.decode_data,
                decode_checkpoint=functools.partial(_decoded, self._backend),
                options=options,
            )
            self._running = claim
            engine.forget_snapshot()
            work = functools.partial(self._perform, engine, run, packed)
            self._thread = threading.Thread(target=work, name="raysgd-run", daemon=True)
            self._thread.start()

    def fetch_next_result(self) -> list[dict[str, Any]] | None:
        """Return what every rank reported in the next round; None: the function has ended."""
        result = self.fetch_next_round()
        return None if result is None else result.rows

    def get_next_results(self) -> list[SimpleNamespace] | None:
        """Return the next round as results with a `type` and `data`, as in Ray Train 1.x."""
        rows = self.fetch_next_result()
        return None if rows is None else [SimpleNamespace(type=TrainingResultType.REPORT, data=row) for row in rows]

    def run(self, train_func: Callable[..., Any]) -> list[Any]:
        """Run `train_func` to its end, and return what every rank returned."""
        self.start_training(train_func)
        return self.finish_training()

    def fetch_next_round(self, on_poll: Callable[[], None] = lambda: None) -> RoundResult | None:
        """Return the next round with the number of the newest checkpoint at that time. `on_poll` is
        called regularly while this waits, and before it returns."""
        run = self._current("fetch_next_result")
        while True:
            try:
                result = run.next_round(POLL_S)
            except queue.Empty:
                on_poll()
                continue
            on_poll()
            if result is None and run.error is not None:
                raise run.error
            return result

    def unfetched_rounds(self) -> list[RoundResult]:
        """Remove and return the newest run's complete rounds that were not fetched yet."""
        return [] if self._run is None else self._run.unfetched()

    def finish_training(self) -> list[Any]:
        """Wait for the function, also with rounds left. Return what every rank returned."""
        run = self._current("finish_training")
        assert self._thread is not None
        while self._thread.is_alive():
            self._thread.join(POLL_S)
        if run.error is not None:
            raise run.error
        return run.values

    def cancel(self, error: BaseException) -> None:
        """Stop the current run. The workers stay."""
        if self._engine is not None:
            self._stop_run(self._engine, error)

    def _stop_run(self, engine: Engine, error: BaseException) -> None:
        thread = self._thread
        if thread is not None and thread.is_alive():
            engine.cancel(error)
            thread.join(STOP_S)
        engine.cancel(None)

    def _current(self, call: str) -> FunctionRun:
        self._active()
        if self._run is None:
            raise TrainBackendError(f"{call}() was called before start_training(): there is nothing to wait for")
        return self._run

    def _check_free(self) -> None:
        """Raise an error while a function runs, whose own thread may use the workers (hooks)."""
        thread, running = self._thread, self._running
        if running and thread is not None and thread.is_alive() and thread is not threading.current_thread():
            raise TrainingRunningError(
                f"a training function is running on these workers: {running.describe()}. Wait until it ends "
                "(finish_training, or get_final_results(force=True) of its iterator) before you use them for something "
                "else, or use another trainer"
            )

    # -- the run's thread -----------------------------------------------------------------------------

    def _perform(self, engine: Engine, run: FunctionRun, task: Any) -> None:
        error: BaseException | None = None
        try:
            job = Job(
                Call(FunctionReplica.function, {"task": task}),
                again="resume",
                max_failures=self._max_retries,
                lead=1,  # a function's steps are checkpoints, which may be hours apart
                prepare=lambda: self._prepare(engine, run),
                hurry_s=HURRY_S,
                is_waiting=run.keeps_ranks_waiting,
            )
            run.finish([pickle.loads(value) for value in engine.run(job)[-1].values])
        except TrainingFailedError as failed:
            error = TrainingWorkerError(str(failed))
            error.__cause__ = failed
        except BaseException as raised:  # raised in the thread that waits for the run
            error = raised
        run.close(error)
        engine.cancel(None)  # a late cancellation of this run must not end the next one

    def _prepare(self, engine: Engine, run: FunctionRun) -> dict[str, Any]:
        """Call the backend's hooks. Return the function's arguments for this attempt."""
        prepared = -1
        while prepared != engine.generation:  # a worker may fail while a hook runs
            self._call_hooks()
            prepared = engine.generation
            with contextlib.suppress(WorkersChanged):
                self._backend.on_training_start(self._hooks_group, self._config)
        attempt = run.begin_attempt(engine.world_size, engine.nodes)
        payload = run.manager.payload
        return {"attempt": attempt, "checkpoint": None if payload is None else Blob(payload)}

    def _call_hooks(self) -> None:
        """Call the backend's hooks for a new generation, again if it changes meanwhile."""
        engine = self._active()
        while self._hooks_called_for != engine.generation:
            first, self._hooks_called_for = self._hooks_called_for < 0, engine.generation
            changes = engine.recoveries[self._seen_recoveries :]
            self._seen_recoveries = len(engine.recoveries)
            failed = sorted(
                {rank for change in changes if change.reason not in PLANNED for rank in change.removed_ranks}
            )
            with contextlib.suppress(WorkersChanged):
                if failed and not first:
                    self._backend.handle_failure(self._hooks_group, failed, self._config)
                else:
                    self._backend.on_start(self._hooks_group, self._config)

    def _failures_left(self) -> int:
        """Return how many more worker failures the run may survive."""
        failed = sum(each.reason not in PLANNED for each in self.recoveries_of_run)
        return self._max_retries if self._max_retries < 0 else max(self._max_retries - failed, 0)

    def _on_report(self, message: FunctionReport, body: Any, acknowledge: Callable[[], None]) -> None:
        if self._run is None:
            acknowledge()
        else:
            self._run.receive(message, body, acknowledge)

    def _on_recovery(self, recovery: Recovery) -> None:
        self._rounds_before.append(0 if self._run is None else self._run.reports)

    # -- checkpoints ----------------------------------------------------------------------------------

    @property
    def checkpoint_manager(self) -> CheckpointManager | None:
        return None if self._run is None else self._run.manager

    @property
    def latest_checkpoint_id(self) -> int | None:
        """Return the number of the newest checkpoint. Numbers may begin above 0."""
        return None if self._run is None else self._run.manager.latest_id


def executor_maker(
    config: BackendConfig, count: int, worker: WorkerResources, max_retries: int, **more: Any
) -> Callable[[], BackendExecutor]:
    """Return what creates an executor of `count` such workers."""
    return functools.partial(
        BackendExecutor, config, count, worker.cpus, worker.gpus, worker.custom, max_retries, **more
    )


def _decoded(backend: Backend, payload: bytes) -> bytes:
    """Return a checkpoint that a worker has encoded as the user gave it."""
    if backend.decode_data is Backend.decode_data or is_directory(payload):
        return payload
    content = Checkpoint.from_bytes(payload, trusted=True).to_dict()
    return Checkpoint.from_dict(backend.decode_data(content)).to_bytes(dumps=dumps)


@dataclass(frozen=True, kw_only=True)
class FunctionJob:
    """A configured run that has not started: `fit()` starts it on the driver, and Tune in a trial.

    `make` creates the executor without starting it. `checkpoint` is what the function starts from.
    """

    make: Callable[[], BackendExecutor]
    function: Callable[..., Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: Any = None
    checkpoint_config: CheckpointConfig | None = None
    options: RunOptions = field(default_factory=RunOptions)

    def manager(self, directory: Any) -> CheckpointManager:
        """Return the manager of the run's checkpoints, which are stored in its directory."""
        return CheckpointManager(
            directory, self.checkpoint_config, latest_id=BEFORE_FIRST, initial=payload_of(self.checkpoint, dumps)
        )

    def begin(
        self,
        executor: BackendExecutor,
        manager: CheckpointManager,
        trial: Mapping[str, Any],
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the function on running workers; `ready` is called right before that."""
        options = replace(self.options, trial=trial)
        executor.start_training(self.function, config=self.config, options=options, manager=manager, ready=ready)
