"""Runs training functions on the engine: hands out the newest checkpoint, takes in what is reported.

start_training(fn)
    a thread asks the engine to run fn on every worker; whenever it is fanned out (again):
        the backend's hooks are called, if the workers are not those of the last time
        fn gets the newest checkpoint
fetch_next_result()  -> what every rank reported in the next round, or None when the function has ended
finish_training()    -> what every rank returned
"""

from __future__ import annotations

import functools
import itertools
import logging
import pickle
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from raysgd.config import ElasticConfig
from raysgd.core.messages import FunctionReport
from raysgd.core.policy import Recovery
from raysgd.core.protocols import Call
from raysgd.engine.call_lock import CallLock, Claim
from raysgd.engine.engine import Engine, Job
from raysgd.errors import ConfigError, TrainingFailedError
from raysgd.storage.locations import Place, place
from raysgd.train.backends import BackendConfig, backend_of
from raysgd.train.checkpoint import Checkpoint
from raysgd.train.checkpoint_manager import CheckpointKeeper
from raysgd.train.errors import (
    InactiveWorkerGroupError,
    TrainBackendError,
    TrainingRunningError,
    TrainingWorkerError,
)
from raysgd.train.fit.checkpoint_strategy import CheckpointConfig, check_strategy
from raysgd.train.replica import FunctionReplica, FunctionReplicaFactory
from raysgd.train.run import Run, RunOptions, Told, payload_of, task_of
from raysgd.train.worker_group import TrainWorkerGroup, WorkerGroup, check_resources, limits_for
from raysgd.workers.blob import Blob
from raysgd.workers.cluster import driver_address, ensure_cluster
from raysgd.workers.ray_group import RayGroup
from raysgd.workers.serialization import dumps

__all__ = ["BackendExecutor", "check_max_retries"]

logger = logging.getLogger("raysgd")

LOOK_S = 0.5
STOP_S = 30.0
# For a change of members: only the ranks that save checkpoints come to a stop there, the others wait for them.
HURRY_S = 2.0
PLANNED = ("growth", "shrink", "preemption")


class BackendExecutor:
    """Owns the engine, the backend's hooks and the run that is on. `Trainer` adds a log directory and callbacks."""

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
        self._max_retries = check_max_retries(max_retries)
        self._elastic = elastic or ElasticConfig(hang_timeout_s=1800)
        self._engine: Engine | None = None
        self._group: WorkerGroup | None = None
        self._settled = -1
        self._seen_recoveries = self._recoveries_before = 0
        self._numbers = itertools.count(1)
        self._run: Run | None = None
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
        """Starts the workers, and calls the hook once in each of them."""
        if self._engine is not None:
            raise TrainBackendError("the workers were started already; call shutdown() first to start anew")
        ensure_cluster()
        hang_s = self._elastic.hang_timeout_s
        limits = limits_for(collective_s=min(self._config.collective_timeout_s, 0.9 * hang_s), hang_s=hang_s)
        backend = self._config.make_backend(
            host=driver_address(),
            use_gpu=self._resources.gpus > 0,
            join_s=limits.join_s,
            collective_s=limits.collective_s,
        )
        make = None if train_cls is None else functools.partial(train_cls, *train_cls_args, **(train_cls_kwargs or {}))
        engine = Engine(
            RayGroup(backend, self._resources),
            backend,
            FunctionReplicaFactory(dumps=dumps, encode=type(self._backend).encode_data, make=make),
            hook=initialization_hook,
            target=self._count,
            least=self._least,
            elastic=self._elastic,
            limits=limits,
            on_message=self._on_message,
        )
        engine.start()
        self._engine = engine
        self._group = WorkerGroup.of(engine, has_object=train_cls is not None, guard=self._check_free)
        try:
            self._settle()
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Ends the run, if one is on, and the workers."""
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
            self._group = None
            engine.stop()

    def lend(self) -> TrainWorkerGroup:
        """The objects in the workers, for the user to call directly. Its shutdown is this executor's."""
        return TrainWorkerGroup(self._active(), self.shutdown)

    @property
    def is_started(self) -> bool:
        return self._engine is not None

    @property
    def is_running(self) -> bool:
        """Does a function run?"""
        return self._thread is not None and self._thread.is_alive()

    @property
    def worker_group(self) -> WorkerGroup:
        self._active()
        assert self._group is not None
        return self._group

    @property
    def recoveries(self) -> list[Recovery]:
        """Every change of the workers so far: losses, growth, preemptions."""
        return self._active().recoveries

    @property
    def recoveries_of_run(self) -> list[Recovery]:
        """Those since the newest run began."""
        return self.recoveries[self._recoveries_before :]

    @property
    def world_size(self) -> int:
        return self._active().world_size

    def _active(self) -> Engine:
        if self._engine is None:
            raise InactiveWorkerGroupError(
                "the workers are not active: call start() first (after shutdown(), start() makes new ones)"
            )
        return self._engine

    # -- runs -----------------------------------------------------------------------------------------

    def start_training(
        self,
        train_func: Callable[..., Any],
        run_dir: str | Place,
        checkpoint: Any = None,
        checkpoint_strategy: CheckpointConfig | None = None,
        latest_checkpoint_id: int | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
        keeper: CheckpointKeeper | None = None,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        """Begins to run the function on every worker, and returns at once. A `keeper` goes before what is said of
        checkpoints. `ready` is called when all was checked, right before the function begins."""
        engine = self._active()
        task = task_of(train_func, config)
        check_strategy(checkpoint_strategy)
        name = getattr(train_func, "__name__", type(train_func).__name__)
        with (claim := self._starting.claim(f"the function {name!r}")):
            self._check_free()
            keeper = keeper or CheckpointKeeper(
                place(run_dir) / "checkpoints",
                checkpoint_strategy,
                latest_id=latest_checkpoint_id or 0,
                initial=payload_of(checkpoint, dumps),
            )
            keeper.check_storage()
            decode, packed = type(self._backend).decode_data, engine.pack(task)
            self._recoveries_before = len(engine.recoveries)
            ready()
            self._run = run = Run(next(self._numbers), keeper, fail=engine.cancel, decode=decode, options=options)
            self._running = claim
            engine.state_changed_by_hand(replaced=True)
            work = functools.partial(self._perform, engine, run, packed)
            self._thread = threading.Thread(target=work, name="raysgd-run", daemon=True)
            self._thread.start()

    def fetch_next_result(self) -> list[dict[str, Any]] | None:
        """What every rank reported in the next round, waiting for it; None when the function has ended. An error of
        the function's is raised here."""
        told = self.fetch_next_round()
        return None if told is None else told.rows

    def fetch_next_round(self, on_look: Callable[[], None] = lambda: None) -> Told | None:
        """The same, with the number of the newest checkpoint at that time. `on_look` is called now and then while we
        wait, and before a round is given."""
        run = self._current("fetch_next_result")
        while True:
            try:
                told = run.next_round(LOOK_S)
            except queue.Empty:
                on_look()
                continue
            on_look()
            if told is None and run.error is not None:
                raise run.error
            return told

    def unfetched_rounds(self) -> list[Told]:
        """Complete rounds of the newest run that nobody has fetched yet. Does not wait."""
        return [] if self._run is None else self._run.unfetched()

    def finish_training(self) -> list[Any]:
        """Waits for the function's end; what every rank returned. Reports that nobody fetched do not hold it up."""
        run = self._current("finish_training")
        assert self._thread is not None
        while self._thread.is_alive():
            self._thread.join(LOOK_S)
        if run.error is not None:
            raise run.error
        return run.values

    def cancel(self, error: BaseException) -> None:
        """Stops the run that is on; the workers stay."""
        if self._engine is not None:
            self._stop_run(self._engine, error)

    def _stop_run(self, engine: Engine, error: BaseException) -> None:
        thread = self._thread
        if thread is not None and thread.is_alive():
            engine.cancel(error)
            thread.join(STOP_S)
        engine.cancel(None)

    def _current(self, call: str) -> Run:
        self._active()
        if self._run is None:
            raise TrainBackendError(f"{call}() was called before start_training(): there is nothing to wait for")
        return self._run

    def _check_free(self) -> None:
        """One run at a time; its own thread may use the workers (in the backend's hooks), nobody else."""
        thread, running = self._thread, self._running
        if running and thread is not None and thread.is_alive() and thread is not threading.current_thread():
            raise TrainingRunningError(
                f"a training function is running on these workers: {running.describe()}. Wait for its end "
                "(finish_training, or get_final_results(force=True) of its iterator) before you use them for something "
                "else, or use another trainer"
            )

    # -- the run's thread -----------------------------------------------------------------------------

    def _perform(self, engine: Engine, run: Run, task: Any) -> None:
        error: BaseException | None = None
        try:
            job = Job(
                Call(FunctionReplica.function, {"task": task}),
                again="resume",
                max_failures=self._max_retries,
                lead=1,  # steps are checkpoints here, and may be hours apart
                prepare=lambda: self._prepare(engine, run),
                hurry_s=HURRY_S,
            )
            run.end([pickle.loads(value) for value in engine.run(job)[-1].values])
        except TrainingFailedError as failed:
            error = TrainingWorkerError(str(failed))
            error.__cause__ = failed
        except BaseException as raised:  # told to whoever waits for the run, in their own thread
            error = raised
        run.closed(error)
        engine.cancel(None)  # what was cancelled after the last call has ended must not end the next one

    def _prepare(self, engine: Engine, run: Run) -> dict[str, Any]:
        """Call the backend's hooks. Return what the function is given in this attempt."""
        self._settle()
        attempt = run.begin_attempt(engine.world_size, engine.nodes)
        payload = run.keeper.payload
        self._backend.on_training_start(self._group, self._config)
        return {"attempt": attempt, "checkpoint": None if payload is None else Blob(payload)}

    def _settle(self) -> None:
        """Call the backend's hooks for the workers that stand, until they are still those when the hooks are done."""
        engine = self._active()
        while self._settled != engine.generation:
            first, self._settled = self._settled < 0, engine.generation
            changes = engine.recoveries[self._seen_recoveries :]
            self._seen_recoveries = len(engine.recoveries)
            lost = sorted({rank for change in changes if change.reason not in PLANNED for rank in change.lost_ranks})
            if lost and not first:
                self._backend.handle_failure(self._group, lost, self._config)
            else:
                self._backend.on_start(self._group, self._config)

    def _on_message(self, message: FunctionReport, body: Any) -> None:
        if self._run is not None:
            self._run.take(message, body)

    # -- checkpoints ----------------------------------------------------------------------------------

    @property
    def latest_checkpoint(self) -> dict[str, Any] | None:
        """The newest checkpoint of the newest run, also when it was not written."""
        found = self.latest_checkpoint_object
        return None if found is None else found.to_dict()

    @property
    def latest_checkpoint_object(self) -> Checkpoint | None:
        return None if self._run is None else self._run.keeper.latest

    @property
    def latest_checkpoint_id(self) -> int | None:
        """How many checkpoints there have been (counted from what the run was started with)."""
        return None if self._run is None else self._run.keeper.latest_id

    @property
    def latest_checkpoint_dir(self) -> Place | None:
        return None if self._run is None else self._run.keeper.directory

    @property
    def latest_checkpoint_path(self) -> Place | None:
        """The newest checkpoint in storage."""
        return None if self._run is None else self._run.keeper.latest_path

    @property
    def best_checkpoint_path(self) -> Place | None:
        """The best checkpoint in storage, by the run's strategy; by default the newest."""
        return None if self._run is None else self._run.keeper.best_path


def check_max_retries(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < -1:
        raise ConfigError(f"max_retries must be a whole number of losses, or -1 for no bound, got {value!r}")
    return value
