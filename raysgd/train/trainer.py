"""The function face: runs functions of the user's on workers that may come and go."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from raysgd.callbacks.base import Run
from raysgd.callbacks.folder import create_folder
from raysgd.callbacks.history import History
from raysgd.config import ElasticConfig, WorkerResources
from raysgd.core.policy import Recovery
from raysgd.errors import ConfigError
from raysgd.storage.locations import Place, Uri, copy_logs, names, place
from raysgd.train.backends import parse_backend
from raysgd.train.callbacks import RunCallbacks
from raysgd.train.errors import InactiveWorkerGroupError, TrainBackendError
from raysgd.train.executor import BackendExecutor
from raysgd.train.fit.checkpoint_strategy import CheckpointConfig
from raysgd.train.fit.job import FunctionJob
from raysgd.train.iterator import TrainingIterator
from raysgd.train.run import RunOptions, task_of
from raysgd.train.shards import make_shards
from raysgd.train.worker_group import TrainWorkerGroup, WorkerGroup

__all__ = ["Trainer"]


class Trainer:
    """Runs training functions on `num_workers` processes.

        def train_func(config):
            for epoch in range(config["epochs"]):
                train.report(epoch=epoch)
            return train.world_rank()

        with Trainer(backend="torch", num_workers=2) as trainer:
            print(trainer.run(train_func, config={"epochs": 3}))

    What `run()` does:

        every worker runs the function
        every rank has reported     -> callbacks hear it; its checkpoint is stored
        a worker is lost            -> the function runs again from the newest checkpoint, in the workers that are left
        machines become free        -> new workers join when a checkpoint has been saved
        return what each rank returned

    `logdir` is a path, or a URI such as `s3://bucket/runs`: then checkpoints are stored there, and what callbacks write
    in `~/ray_results` is copied there when a run ends. `max_retries` bounds the losses that one run survives (-1: no bound).
    """

    def __init__(
        self,
        backend: Any,
        num_workers: int = 1,
        use_gpu: bool = False,
        resources_per_worker: Mapping[str, float] | None = None,
        logdir: str | Place | None = None,
        max_retries: int = 3,
        *,
        elastic: ElasticConfig | None = None,
    ) -> None:
        config = parse_backend(backend)
        if not isinstance(use_gpu, bool):
            raise ConfigError(f"use_gpu must be True or False, got {use_gpu!r}")
        if elastic is not None and not isinstance(elastic, ElasticConfig):
            raise ConfigError(f"elastic must be a raysgd.ElasticConfig, got {elastic!r}")
        wanted = WorkerResources.parse(1, use_gpu, resources_per_worker, gpu_asked=use_gpu)
        self._count, self._worker = num_workers, wanted
        self._make: Callable[[], BackendExecutor] = functools.partial(
            BackendExecutor,
            config,
            num_workers,
            wanted.cpus,
            wanted.gpus,
            wanted.custom,
            max_retries,
            elastic=elastic,
        )
        self._executor = self._make()
        self.storage, self.logdir = _make_places(logdir)
        self._earlier = max(_newest_run(self.storage), _newest_run(self.logdir))
        self.history = History()  # what was reported in all runs, and fetched, as a table
        self._runs = 0
        self._described = f"{type(config).__name__}, {num_workers} worker{'s' if num_workers > 1 else ''}"

    # -- life -----------------------------------------------------------------------------------------

    def start(
        self,
        initialization_hook: Callable[[], Any] | None = None,
        train_cls: type | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Starts the workers. The hook runs once in each; each makes an object of `train_cls`, with the other
        arguments, for `execute`."""
        if initialization_hook is not None and not callable(initialization_hook):
            raise ConfigError(f"initialization_hook must be a function without arguments, got {initialization_hook!r}")
        self._executor.start(initialization_hook, train_cls, args, kwargs)

    def shutdown(self) -> None:
        """Ends the workers and frees what they held. What was run can still be asked for (checkpoints, directories)."""
        self._executor.shutdown()

    def __enter__(self) -> Trainer:
        if not self._executor.is_started:
            self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    # -- runs -----------------------------------------------------------------------------------------

    def run(
        self,
        train_func: Callable[..., Any],
        config: Mapping[str, Any] | None = None,
        callbacks: Iterable[Any] | None = None,
        checkpoint: Any = None,
        checkpoint_strategy: CheckpointConfig | None = None,
        dataset: Any = None,
    ) -> list[Any]:
        """Runs the function to its end; what each rank returned, in rank order.

        `checkpoint` (a dict, or the path or URI of a stored one) is what `load_checkpoint()` gives at first.
        `dataset` is a Ray Dataset, or a dict of them by name: each worker reads its part through
        `train.get_dataset_shard(name)`.
        """
        self._check_started()
        rounds = TrainingIterator(self._executor, RunCallbacks(callbacks, history=self.history))
        begin = functools.partial(self._begin, train_func, config, checkpoint, checkpoint_strategy, dataset)
        run = Run(
            trainer="Trainer",
            name=getattr(train_func, "__name__", type(train_func).__name__),
            num_workers=self._executor.world_size,
            config=dict(config) if isinstance(config, Mapping) else {},
            folder=self.logdir / self._run_name(self._runs + 1),
        )
        try:
            for _ in rounds.heard(run, begin):
                pass
        finally:
            copy_logs(self.logdir / self._run_name(self._runs), self.storage / self._run_name(self._runs))
        results = rounds.get_final_results()
        assert results is not None
        return results

    def run_iterator(
        self,
        train_func: Callable[..., Any],
        config: Mapping[str, Any] | None = None,
        checkpoint: Any = None,
        checkpoint_strategy: CheckpointConfig | None = None,
        dataset: Any = None,
    ) -> TrainingIterator:
        """Runs the function, and yields what all ranks report, round by round."""
        self._check_started()
        rounds = TrainingIterator(self._executor, RunCallbacks(None, history=self.history))
        self._begin(train_func, config, checkpoint, checkpoint_strategy, dataset, lambda: None)
        return rounds

    def _begin(
        self,
        train_func: Any,
        config: Any,
        checkpoint: Any,
        checkpoint_strategy: Any,
        dataset: Any,
        ready: Callable[[], None],
    ) -> None:
        def counted() -> None:
            self._runs += 1
            run_dir.mkdir(parents=True, exist_ok=True)
            ready()

        name = self._run_name(self._runs + 1)
        run_dir = self.logdir / name
        shards = make_shards(dataset, cpus_per_worker=self._worker.cpus)
        self._executor.start_training(
            train_func,
            self.storage / name,
            checkpoint,
            checkpoint_strategy,
            config=config,
            options=RunOptions(trial={"trial_dir": run_dir}, shards=shards),
            ready=counted,
        )

    def execute(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call `func(obj, *args, **kwargs)` in every worker, with its object of `train_cls`; answers in rank order."""
        self._check_started()
        return self._executor.worker_group.execute_object(func, args, kwargs)

    def execute_single(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The same on rank 0 only."""
        self._check_started()
        return self._executor.worker_group.execute_object(func, args, kwargs, only=0)[0]

    def to_worker_group(self, train_cls: type, *args: Any, **kwargs: Any) -> TrainWorkerGroup:
        """Workers that hold an object of `train_cls` each, with the backend set up, for you to drive by Ray calls. They
        are yours: shut the group down when you are done."""
        if self._executor.is_started:
            raise TrainBackendError(
                "to_worker_group() starts workers of its own: make a new Trainer for it, and do not start it"
            )
        executor = self._make()
        executor.start(None, train_cls, args, kwargs)
        return executor.lend()

    def to_tune_trainable(self, train_func: Callable[..., Any], dataset: Any = None) -> Any:
        """A Tune Trainable class: each trial runs the function, on workers such as this trainer's, with the trial's config
        and its own parts of the data sets (extra: tune)."""
        if self._executor.is_started:
            raise TrainBackendError(
                "to_tune_trainable() starts workers in each trial: make a new Trainer for it, and do not start it"
            )
        task_of(train_func, None)
        share = functools.partial(make_shards, dataset, cpus_per_worker=self._worker.cpus)
        share()  # refuses what is no data set; it opens none
        try:
            tune = import_module("raysgd.tune")
        except RuntimeError as error:
            raise ConfigError(str(error)) from error
        make, bundles = self._make, [{"CPU": 1.0}, *[self._worker.as_dict()] * self._count]
        return tune.as_trainable(
            tune.FunctionTrial(
                getattr(train_func, "__name__", "function"),
                lambda config: FunctionJob(
                    make=make, function=train_func, config=config, options=RunOptions(shards=share())
                ),
                lambda config: (bundles, "PACK"),
            )
        )

    def _check_started(self) -> None:
        if not self._executor.is_started:
            raise InactiveWorkerGroupError(
                "this trainer is not active: call start() before run(), and not after shutdown()"
            )

    # -- what there is --------------------------------------------------------------------------------

    @property
    def worker_group(self) -> WorkerGroup:
        """The workers, for plain functions: `trainer.worker_group.execute(fn)`."""
        return self._executor.worker_group

    def __repr__(self) -> str:
        state = "not active" if not self._executor.is_started else "running" if self._executor.is_running else "idle"
        newest = f", newest {self._run_name(self._runs)}" if self._runs else ""
        return f"Trainer({self._described}, {self._runs} run{'' if self._runs == 1 else 's'}{newest}, {state})"

    @property
    def recoveries(self) -> list[Recovery]:
        """Every change of the workers so far: losses, growth, preemptions."""
        return self._executor.recoveries

    @property
    def latest_run_dir(self) -> Path | None:
        """The newest run's, on this machine; None before the first."""
        return self.logdir / self._run_name(self._runs) if self._runs else None

    def _run_name(self, number: int) -> str:
        return f"run_{self._earlier + number:03d}"

    @property
    def latest_checkpoint(self) -> dict[str, Any] | None:
        """The newest checkpoint of the newest run, also when it was never written."""
        return self._executor.latest_checkpoint

    def get_latest_checkpoint(self) -> dict[str, Any] | None:
        """`latest_checkpoint`, as a call."""
        return self.latest_checkpoint

    @property
    def latest_checkpoint_dir(self) -> Place | None:
        """Where the newest run's checkpoints are."""
        return self._executor.latest_checkpoint_dir

    @property
    def latest_checkpoint_path(self) -> Place | None:
        """The newest checkpoint in storage."""
        return self._executor.latest_checkpoint_path

    @property
    def best_checkpoint_path(self) -> Place | None:
        """The best checkpoint in storage by the run's strategy; by default the newest."""
        return self._executor.best_checkpoint_path


def _make_places(logdir: str | Place | None) -> tuple[Place, Path]:
    """Where checkpoints are stored, and where callbacks write."""
    given = None if logdir is None else place(logdir)
    if isinstance(given, Uri):
        return given, create_folder(given.name, "sgd")
    path = create_folder(given, "sgd")
    return path, path


def _newest_run(folder: Place) -> int:
    """Runs that lie there already keep their names."""
    numbers = [name.removeprefix("run_") for name in names(folder) if name.startswith("run_")]
    return max((int(number) for number in numbers if number.isdigit()), default=0)
