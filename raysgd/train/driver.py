"""Runs training functions on the engine: sends the newest checkpoint, and receives the reports.
Driver.

    begin(job, manager)
        a thread asks the engine to run the function on every worker; before each attempt:
            the backend's hooks are called, if the workers have changed
            the function gets the newest checkpoint
    fetch_next_round()   -> what every rank reported in the next round, None when the function has ended
    finish_training()    -> what every rank returned

`TrainingIterator` follows a run, and calls the callbacks.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import pickle
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from raysgd.callbacks.base import TRACES, CallResult, Run
from raysgd.callbacks.callback_list import CallbackList
from raysgd.config import ElasticConfig, WorkerResources, at_least, refuse_comparison, refuse_rates
from raysgd.core.messages import FunctionReport
from raysgd.core.metrics import plain
from raysgd.core.policy import PLANNED, Recovery
from raysgd.core.protocols import Call
from raysgd.engine.call import Job
from raysgd.engine.call_lock import CallLock, Claim
from raysgd.engine.engine import Engine
from raysgd.errors import TrainingFailedError
from raysgd.train.backends import BackendConfig, backend_of
from raysgd.train.checkpoint_manager import CheckpointManager, RunCheckpoints
from raysgd.train.errors import (
    InactiveWorkerGroupError,
    TrainBackendError,
    TrainingRunningError,
    TrainingWorkerError,
)
from raysgd.train.job import FunctionJob, check_function, function_name
from raysgd.train.replica import FunctionReplica, FunctionReplicaFactory
from raysgd.train.rounds import FunctionRun, RoundResult
from raysgd.train.session_functions import Codec
from raysgd.train.settings import HANG_S, check_failure_limit
from raysgd.train.worker_group import WorkerGroup, WorkersChanged, limits_for
from raysgd.workers.calls import Blob
from raysgd.workers.cluster import driver_address, ensure_cluster
from raysgd.workers.ray_group import RayGroup
from raysgd.workers.serialization import dumps, pack
from raysgd.workers.tracebacks import folding

logger = logging.getLogger("raysgd")

POLL_S = 0.5
STOP_S = 30.0
# For a planned change: only the ranks that save checkpoints stop at the boundary, and the others wait for them.
HURRY_S = 2.0


class FunctionDriver(RunCheckpoints):
    """Owns the engine, the backend's hooks and the current run, with its thread. Each worker
    reserves the resources `worker`; the other arguments are those of `BackendExecutor`."""

    def __init__(
        self,
        config: BackendConfig,
        num_workers: int,
        worker: WorkerResources,
        max_retries: int = 3,
        *,
        elastic: ElasticConfig | None = None,
        start_with: int | None = None,
    ) -> None:
        at_least("num_workers", num_workers, 1, whole=True)
        check_failure_limit("max_retries", max_retries)
        self._config, self._backend = config, backend_of(config)
        self._count, self._least, self._resources, self._max_retries = num_workers, start_with, worker, max_retries
        self._elastic = elastic or ElasticConfig(hang_timeout_s=HANG_S)
        refuse_rates(self._elastic, "a training function owns its optimizers")
        refuse_comparison(self._elastic, "a training function owns its models, so nothing else knows them")
        self._engine: Engine | None = None
        self._group: WorkerGroup | None = None
        self._hooks_group: WorkerGroup | None = None  # for the backend's hooks, which a worker failure does not end
        # Since the newest run began, each with the number of rounds before it as its step.
        self.recoveries_of_run: list[Recovery] = []
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
        hang_s, self.recoveries_of_run = self._elastic.hang_timeout_s, []
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
        make_group = functools.partial(WorkerGroup.of, engine, has_object=train_cls is not None, guard=self._check_free)
        self._group, self._hooks_group = make_group(), make_group(max_failures=self._failures_left)
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

    def begin(self, job: FunctionJob, manager: CheckpointManager, *, ready: Callable[[], None] = lambda: None) -> None:
        """Start the function on every worker, and return at once. `manager` keeps its checkpoints.
        `ready` is called after all checks, right before the function begins."""
        engine, task = self._active(), check_function(job.function, job.config)
        with (claim := self._starting.claim(f"the function {function_name(job.function)!r}")):
            self._check_free()
            manager.check_storage()
            packed = pack(task)
            self.recoveries_of_run = []
            ready()
            number = 1 if self._run is None else self._run.number + 1
            self._run = run = FunctionRun(number, manager, job, self._backend, fail=engine.cancel)
            self._running = claim
            engine.forget_snapshot()
            work = functools.partial(self._perform, engine, run, packed)
            self._thread = threading.Thread(target=work, name="raysgd-run", daemon=True)
            self._thread.start()

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
        reports = 0 if self._run is None else self._run.reports
        self.recoveries_of_run.append(replace(recovery, step=reports))

    # -- checkpoints ----------------------------------------------------------------------------------

    @property
    def checkpoint_manager(self) -> CheckpointManager | None:
        return None if self._run is None else self._run.manager


class TrainingIterator:
    """Yields what all ranks reported in each round: a list of dicts. The function does not wait for
    that."""

    def __init__(
        self,
        executor: FunctionDriver,
        callbacks: CallbackList | None = None,
        *,
        record: Callable[[RoundResult], None] = lambda result: None,
    ) -> None:
        """`record` gets every complete round, before the callbacks do, even at a stop."""
        self._executor, self._callbacks, self._record = executor, callbacks or CallbackList([]), record
        self._finished = False
        self._rounds = self._recoveries = 0
        self._results: list[Any] | None = None

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        return self

    @folding
    def __next__(self) -> list[dict[str, Any]]:
        result = self.next_round()
        if result is None:
            raise StopIteration
        return result.rows

    def next_round(self) -> RoundResult | None:
        """Wait for the next round, and return it with the number of the newest checkpoint at that
        time. Return None when the function has ended."""
        if self._finished:
            return None
        try:
            while (result := self._executor.fetch_next_round(self._report_recoveries)) is not None:
                visible = _without_traces(result)
                self._record(visible)
                if result.complete:
                    self._report_round(result.rows, visible.rows)
                    return visible
            self._results = self._executor.finish_training()
        except BaseException as error:  # of the function, of a callback that stops training, or Ctrl-C
            self._stop(error)
            if isinstance(error, StopIteration):  # would end a loop over the rounds as if the function had finished
                raise RuntimeError("the training function raised StopIteration") from error
            raise
        self._finished = True
        return None

    def run_to_end(
        self,
        job: FunctionJob,
        manager: CheckpointManager,
        *,
        trainer: str,
        folder: Path,
        ready: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """Start the function, follow it to its end, and return what each rank returned. `ready` is
        called right before it begins; then the callbacks get the run, which belongs to a `trainer`
        and has a `folder`."""
        started = False
        run = Run(
            trainer=trainer,
            functions=True,
            name=function_name(job.function),
            num_workers=self._executor.world_size,
            processes=self._executor.processes,
            config=dict(job.config) if isinstance(job.config, Mapping) else {},
            folder=folder,
        )

        def start() -> None:
            nonlocal started
            ready()
            started = True
            self._callbacks.start(run)
            self._callbacks.raise_stop()

        try:
            self._executor.begin(job, manager, ready=start)
            while self.next_round() is not None:
                pass
            self._report_recoveries()
        except BaseException as error:
            if started:
                if not self._finished:
                    self._stop(error)
                self._callbacks.error(error)
                self._callbacks.end(failed=True)
            raise
        self._callbacks.end(failed=False)
        assert self._results is not None
        return self._results

    def _stop(self, error: BaseException) -> None:
        self._finished = True
        self._executor.cancel(error if isinstance(error, Exception) else KeyboardInterrupt())
        for result in self._executor.unfetched_rounds():
            self._record(_without_traces(result))

    def _report_round(self, reported: list[dict[str, Any]], visible: list[dict[str, Any]]) -> None:
        self._rounds += 1
        rows = [{name: plain(value) for name, value in row.items()} for row in visible]
        first = rows[0] if rows else {}
        epoch = first.get("epoch")
        result = CallResult(
            kind="report",
            epoch=epoch if isinstance(epoch, int) else None,
            step=int(_finite(first.get("_training_iteration"), self._rounds)),
            metrics=first,
            by_worker=rows,
            world_size=len(rows),
            seconds=float(_finite(first.get("_time_this_iter_s"), 0.0)),
            traces=[row.get(TRACES, {}) for row in reported],
        )
        self._callbacks.result(result)
        self._callbacks.raise_stop()

    def _report_recoveries(self) -> None:
        """Call the callbacks with the recoveries since the last time."""
        for recovery in self._executor.recoveries_of_run[self._recoveries :]:
            self._recoveries += 1
            self._callbacks.recovery(recovery)
        self._callbacks.raise_stop()

    def is_finished(self) -> bool:
        """Return whether all rounds were fetched and the function has ended."""
        return self._finished

    @folding
    def get_final_results(self, force: bool = False) -> list[Any] | None:
        """Return what each rank returned, or None before the end. With `force`, wait for the end,
        and discard what the function still reports."""
        if not self._finished and force:
            for _ in self:
                pass
        if not self._finished:
            logger.info("the function is still running: iterate to its end, or call get_final_results(force=True)")
        return self._results


SGDIterator = TrainingIterator


def _without_traces(result: RoundResult) -> RoundResult:
    """Remove profiler traces, which only the profiler's callback gets."""
    return replace(result, rows=[{name: row[name] for name in row if name != TRACES} for row in result.rows])


def _finite(value: Any, default: float) -> float:
    """Return raysgd's own number in a report, unless the function reported something else there."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else default
