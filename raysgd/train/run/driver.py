"""Runs training functions on the engine: sends the newest checkpoint, and receives the reports.
Driver.

    begin(job, manager)
        a thread asks the engine to run the function on every worker; before each attempt:
            the backend's hooks are called, if the workers have changed
            the function gets the newest checkpoint
    fetch_next_round()   -> what every rank reported in the next round, None when the function has ended
    finish_training()    -> what every rank returned

`TrainingIterator` starts a run, follows it, and calls the callbacks.
"""

from __future__ import annotations

import functools
import logging
import math
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from raysgd.callbacks.base import CallResult, Run
from raysgd.callbacks.callback_list import CallbackList
from raysgd.core.channel.blobs import Blob
from raysgd.core.channel.messages import FunctionReport
from raysgd.core.decisions.policy import PLANNED, Recovery
from raysgd.core.measures.metrics import plain
from raysgd.core.protocols import Call
from raysgd.engine.call import Job
from raysgd.engine.call_lock import CallLock
from raysgd.engine.engine import Engine
from raysgd.errors import TrainingFailedError, counted
from raysgd.train.backends import backend_of
from raysgd.train.errors import (
    InactiveWorkerGroupError,
    TrainBackendError,
    TrainingRunningError,
    TrainingWorkerError,
)
from raysgd.train.replica import FunctionReplica
from raysgd.train.run.checkpoint_manager import CheckpointManager, RunCheckpoints
from raysgd.train.run.job import FunctionJob, FunctionWorkers, check_function, function_name
from raysgd.train.run.rounds import FunctionRun, RoundResult
from raysgd.train.run.worker_group import StartedWorkers, WorkerGroup, limits_for, make_factory
from raysgd.workers.cluster.connecting import ensure_cluster
from raysgd.workers.cluster.nodes import driver_address
from raysgd.workers.ray_group import RayGroup
from raysgd.workers.serialization import pack
from raysgd.workers.tracebacks import folding

logger = logging.getLogger("raysgd")

STOP_S = 30.0
# For a planned change: only the ranks that save checkpoints stop at the boundary, and the others wait for them.
HURRY_S = 2.0
FEWER = (
    "this run begins with %s of %d, because the others have failed and are not replaced yet. prepare_trainer keeps the samples of a "
    "step; a function that gives each worker a batch of its own makes smaller steps. To wait for all workers, call shutdown() and start() "
    "before the run"
)


class FunctionDriver(RunCheckpoints):
    """Owns the workers, from their start to their end, and the newest run."""

    def __init__(self, workers: FunctionWorkers) -> None:
        self.workers, self._backend = workers, backend_of(workers.backend)
        self._started: StartedWorkers | None = None
        self._run: FunctionRun | None = None
        self._recoveries = list[Recovery]()  # since the newest run began, whose list it is then
        self._starting = CallLock()

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
        if self._started is not None:
            raise TrainBackendError("the workers were started already: call shutdown() before you start them again")
        workers, config = self.workers, self.workers.backend
        ensure_cluster(workers.resources)
        hang_s, self._recoveries = workers.elastic.hang_timeout_s, []
        limits = limits_for(collective_s=min(config.collective_timeout_s, 0.9 * hang_s), hang_s=hang_s)
        backend = config.make_backend(
            host=driver_address(),
            gpus=workers.resources.gpus,
            join_s=limits.join_s,
            collective_s=limits.collective_s,
        )
        # Packed first: something that cannot be pickled must not leave the port of a group open.
        factory = make_factory(self._backend, train_cls, train_cls_args, train_cls_kwargs)
        hook = pack(initialization_hook)
        engine = Engine(
            RayGroup(backend, workers.resources, unreachable_s=limits.unreachable_s),
            backend,
            factory,
            hook=hook,
            target=workers.num_workers,
            least=workers.start_with,
            elastic=workers.elastic,
            limits=limits,
            on_report=self._on_report,
            on_recovery=self._on_recovery,
        )
        engine.start()
        make_group = functools.partial(WorkerGroup.of, engine, has_object=train_cls is not None, guard=self._check_free)
        for_hooks = make_group(max_failures=self._failures_left)
        self._started = started = StartedWorkers(engine, make_group(), self._backend, config, for_hooks)
        try:
            started.call_hooks()
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """End the current run, if there is one, and the workers."""
        started, self._started = self._started, None
        if started is None:
            return
        try:
            self._stop_run(
                started.engine, InactiveWorkerGroupError("the workers were shut down while the function ran")
            )
            try:
                self._backend.on_shutdown(started.group, self.workers.backend)
            except Exception as error:
                logger.warning("%s.on_shutdown failed: %s", type(self._backend).__name__, error)
        finally:
            started.engine.stop()

    @property
    def is_started(self) -> bool:
        return self._started is not None

    @property
    def is_running(self) -> bool:
        """Whether a function is running."""
        return self._run is not None and self._run.thread.is_alive()

    @property
    def worker_group(self) -> WorkerGroup:
        return self._require_workers().group

    @property
    def recoveries(self) -> list[Recovery]:
        """All recoveries so far: failures, growth, preemptions."""
        return self._require_workers().engine.recoveries

    @property
    def world_size(self) -> int:
        return self._require_workers().engine.world_size

    def processes(self) -> list[tuple[str, int]]:
        """The machine and the process id of each rank."""
        started = self._started  # a shutdown in another thread may end them
        return started.engine.processes() if started is not None else []

    def _require_workers(self) -> StartedWorkers:
        if self._started is None:
            raise InactiveWorkerGroupError(
                "the workers are not active: call start() first (after shutdown(), start() creates new ones)"
            )
        return self._started

    # -- runs -----------------------------------------------------------------------------------------

    def begin(
        self, job: FunctionJob, manager: CheckpointManager, *, ready: Callable[[], None] = lambda: None
    ) -> FunctionRun:
        """Start the function on every worker, and return at once. `manager` keeps its checkpoints.
        `ready` is called after all checks, right before the function begins."""
        started, task = self._require_workers(), check_function(job.function, job.config)
        with (claim := self._starting.claim(f"the function {function_name(job.function)!r}")):
            self._check_free()
            manager.check_storage()
            packed, recoveries = pack(task), list[Recovery]()
            self._recoveries = recoveries
            ready()
            number = 1 if self._run is None else self._run.number + 1
            fail, forget = started.engine.cancel, started.engine.calls.forget_snapshot
            run = FunctionRun(number, manager, job, self._backend, fail=fail, saved=forget)
            work = functools.partial(self._perform, started, run, packed)
            run.thread = threading.Thread(target=work, name="raysgd-run", daemon=True)
            run.claim, run.recoveries = claim, recoveries
            self._run = run
            forget()
            run.thread.start()
        return run

    def fetch_next_round(self, on_poll: Callable[[], None] = lambda: None) -> RoundResult | None:
        """Fetch the next round with the number of the newest checkpoint at that time. `on_poll` is
        called regularly while this waits, and before it returns."""
        return self._require_run("fetch_next_result").next_round(on_poll)

    def finish_training(self) -> list[Any]:
        """Wait for the function, also with rounds left. Return what every rank returned."""
        return self._require_run("finish_training").finish()

    def cancel(self, error: BaseException) -> None:
        """Stop the current run. The workers stay."""
        if self._started is not None:
            self._stop_run(self._started.engine, error)

    def _stop_run(self, engine: Engine, error: BaseException) -> None:
        if self._run is not None and self._run.thread.is_alive():
            engine.cancel(error)
            self._run.thread.join(STOP_S)
        engine.cancel(None)

    def _require_run(self, call: str) -> FunctionRun:
        self._require_workers()
        if self._run is None:
            raise TrainBackendError(f"{call}() was called before start_training(): there is nothing to wait for")
        return self._run

    def _check_free(self) -> None:
        """Raise an error while a function runs, whose own thread may use the workers (hooks)."""
        run = self._run
        if run is not None and run.thread.is_alive() and run.thread is not threading.current_thread():
            raise TrainingRunningError(
                f"a training function is running on these workers: {run.claim.describe()}. Wait until it ends "
                "(finish_training, or get_final_results(force=True) of its iterator) before you use them for something "
                "else, or use another trainer"
            )

    # -- the run's thread -----------------------------------------------------------------------------

    def _perform(self, started: StartedWorkers, run: FunctionRun, task: Any) -> None:
        engine = started.engine
        error: BaseException | None = None
        try:
            job = Job(
                Call(FunctionReplica.function, {"task": task}),
                again="resume",
                max_failures=self.workers.max_retries,
                lead=1,  # a function's steps are checkpoints, which may be hours apart
                prepare=lambda: self._prepare(started, run),
                hurry_s=HURRY_S,
                is_waiting=run.waits_for_storage,
                on_return=run.note_return,
            )
            run.values = [pickle.loads(value) for value in engine.calls.run(job)[-1].values]
        except TrainingFailedError as failed:
            error = TrainingWorkerError(str(failed))
            error.__cause__ = failed
        except BaseException as raised:  # raised in the thread that waits for the run
            error = raised
        run.close(error)
        engine.cancel(None)  # a late cancellation of this run must not end the next one

    def _prepare(self, started: StartedWorkers, run: FunctionRun) -> dict[str, Any]:
        """Call the backend's hooks. Return the function's arguments for this attempt."""
        started.begin_training()
        attempt = run.begin_attempt(started.engine.world_size, started.engine.nodes)
        attempt, ranks = replace(attempt, workers=self.workers.planned), started.engine.world_size
        if attempt.number == 1 and attempt.workers is not None and ranks < attempt.workers:
            logger.warning(FEWER, counted(ranks, "worker"), attempt.workers)
        payload = run.manager.payload
        return {"attempt": attempt, "checkpoint": None if payload is None else Blob(payload)}

    def _failures_left(self) -> int:
        failed = sum(each.reason not in PLANNED for each in self._recoveries)
        most = self.workers.max_retries
        return most if most < 0 else max(most - failed, 0)

    def _on_report(self, message: FunctionReport, body: Any, acknowledge: Callable[[], None]) -> None:
        if self._run is None:
            acknowledge()
        else:
            self._run.receive(message, body, acknowledge)

    def _on_recovery(self, recovery: Recovery) -> None:
        reports = 0 if self._run is None else self._run.reports
        self._recoveries.append(replace(recovery, step=reports))

    # -- checkpoints ----------------------------------------------------------------------------------

    @property
    def checkpoint_manager(self) -> CheckpointManager | None:
        return None if self._run is None else self._run.manager


class TrainingIterator:
    """Yields what all ranks reported in each round: a list of dicts. The function does not wait for
    that."""

    def __init__(self, executor: FunctionDriver, callbacks: CallbackList | None = None) -> None:
        self._executor, self._callbacks = executor, callbacks or CallbackList([])
        self._run: FunctionRun | None = None
        self._finished = False
        self._rounds = self._recoveries = 0
        self._results: list[Any] | None = None

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        return self

    def begin(self, job: FunctionJob, manager: CheckpointManager, *, ready: Callable[[], None] = lambda: None) -> None:
        """Start the function, as the executor does."""
        self._run = self._executor.begin(job, manager, ready=ready)

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
        run = self._run
        assert run is not None
        try:
            result = run.next_round(self._report_recoveries)
            if result is not None:
                self._report_round(result)
                return result
            self._results = run.finish()
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
            self.begin(job, manager, ready=start)
            while self.next_round() is not None:
                pass
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
        if self._run is None or self._run.thread.is_alive():  # otherwise the workers may have a later run
            self._executor.cancel(error if isinstance(error, Exception) else KeyboardInterrupt())

    def _report_round(self, round_: RoundResult) -> None:
        self._rounds += 1
        rows = [{name: plain(value) for name, value in row.items()} for row in round_.rows]
        first = rows[0] if rows else {}
        epoch = first.get("epoch")
        result = CallResult(
            kind="report",
            epoch=epoch if isinstance(epoch, int) else None,
            step=int(_take_finite(first.get("_training_iteration"), self._rounds)),
            metrics=first,
            by_worker=rows,
            world_size=len(rows),
            seconds=float(_take_finite(first.get("_time_this_iter_s"), 0.0)),
            traces=round_.traces,
        )
        self._callbacks.result(result)
        self._callbacks.raise_stop()

    def _report_recoveries(self) -> None:
        """Call the callbacks with the recoveries since the last time."""
        assert self._run is not None
        for recovery in self._run.recoveries[self._recoveries :]:
            self._recoveries += 1
            self._callbacks.recovery(recovery)
        self._callbacks.raise_stop()

    def is_finished(self) -> bool:
        """Whether all rounds were fetched and the function has ended."""
        return self._finished

    @folding
    def get_final_results(self, force: bool = False) -> list[Any] | None:
        """Get what each rank returned, or None before the end. With `force`, wait for the end, and
        discard what the function still reports."""
        if not self._finished and force:
            for _ in self:
                pass
        if not self._finished:
            logger.info("the function is still running: iterate to its end, or call get_final_results(force=True)")
        return self._results


SGDIterator = TrainingIterator


def _take_finite(value: Any, default: float) -> float:
    """Take raysgd's own number in a report, unless the function reported something else there."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else default
