"""`Trainer`: runs training functions on elastic workers. Driver."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from raysgd.callbacks.history import History
from raysgd.config import ElasticConfig
from raysgd.core.decisions.policy import Recovery
from raysgd.errors import counted
from raysgd.ray_data.datasets import is_dataset
from raysgd.storage.locations import Place, copy_logs, names, place
from raysgd.storage.log_folders import create_folder
from raysgd.storage.remote import Uri
from raysgd.train import in_trial
from raysgd.train.backends import parse_backend
from raysgd.train.callbacks import make_callback_list
from raysgd.train.checkpoint import Checkpoint
from raysgd.train.errors import TrainBackendError
from raysgd.train.run.checkpoint_manager import CheckpointManager, RunCheckpoints
from raysgd.train.run.driver import FunctionDriver, TrainingIterator
from raysgd.train.run.job import FunctionJob, FunctionWorkers, check_function
from raysgd.train.run.splits import make_splits
from raysgd.train.run.worker_group import WorkerGroup
from raysgd.train.settings import CheckpointConfig, ScalingConfig, without_rays_own
from raysgd.trainer.arguments import check_hook
from raysgd.workers.tracebacks import folding


@without_rays_own
class Trainer(RunCheckpoints):
    """Runs training functions on `num_workers` processes.

        def train_func(config):
            for epoch in range(config["epochs"]):
                train.report(epoch=epoch)
            return train.world_rank()

        with Trainer(backend="torch", num_workers=2) as trainer:
            print(trainer.run(train_func, config={"epochs": 3}))

    What `run()` does:

        every worker runs the function
        every rank has reported     -> callbacks are called; the checkpoint is stored
        a worker fails              -> the function runs again from the newest checkpoint, on the remaining workers
        machines become free        -> new workers join after the next checkpoint
        return what each rank returned

    `backend` is "torch", "tensorflow", "horovod" or a `BackendConfig`. With `use_gpu`, each worker
    has one GPU; `resources_per_worker` overrides what a worker reserves. `elastic` is an
    `ElasticConfig`.

    `logdir` is a path, or a URI such as `s3://bucket/runs`: then checkpoints are stored there, and
    what callbacks write in `~/ray_results` is copied there when a run ends. `max_retries` is how
    many worker failures one run survives (-1: any number).
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
        scaling = ScalingConfig(use_gpu=use_gpu, resources_per_worker=resources_per_worker, elastic=elastic)
        workers = FunctionWorkers(config, num_workers, scaling.worker, max_retries, scaling.policy())
        self._executor = FunctionDriver(workers)
        self.storage, self.logdir = _make_places(logdir)
        self.history = History()  # all rounds that were fetched, of all runs
        self._runs = 0
        self._newest: Path | None = None  # the directory of the newest run
        self._to_tune: Any = None  # in a function that Tune runs: what adds checkpoints to its reports

    # -- life -----------------------------------------------------------------------------------------

    @folding
    def start(
        self,
        initialization_hook: Callable[[], Any] | None = None,
        train_cls: type | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Start the workers. Each calls the `initialization_hook` once, and creates an object of
        `train_cls` with the other arguments, for `execute`."""
        check_hook(initialization_hook)
        self._executor.start(initialization_hook, train_cls, args, kwargs)

    def shutdown(self) -> None:
        """End the workers, and free their resources. Past runs remain available."""
        self._executor.shutdown()
        if self._to_tune is not None:
            self._to_tune.end()

    def __enter__(self) -> Trainer:
        if not self._executor.is_started:
            self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._to_tune = None  # the trial has failed: its last report is not repeated
        self.shutdown()

    # -- runs -----------------------------------------------------------------------------------------

    @folding
    def run(
        self,
        train_func: Callable[..., Any],
        config: Mapping[str, Any] | None = None,
        callbacks: Iterable[Any] | None = None,
        checkpoint: Any = None,
        checkpoint_strategy: CheckpointConfig | None = None,
        dataset: Any = None,
    ) -> list[Any]:
        """Run `train_func` to its end, with `config` if it has a parameter. Return what each rank
        returned, in rank order.

        `checkpoint` (a dict, or the path or URI of a stored one) is what `load_checkpoint()`
        returns at first. `dataset` is a Ray Dataset, or a dict of them by name: each worker reads
        its part with `train.get_dataset_shard(name)`. The order of Ray Train 1.x (dataset,
        checkpoint, checkpoint_strategy) is recognized by the type of these arguments. `callbacks`
        get every round of reports, and `checkpoint_strategy` says which checkpoints stay.
        """
        job, manager, ready = self._prepare(train_func, config, *in_order(checkpoint, checkpoint_strategy, dataset))
        rounds = TrainingIterator(self._executor, make_callback_list(callbacks, history=self.history))
        folder, earlier = job.trial["trial_dir"], self._runs
        try:
            return rounds.run_to_end(job, manager, trainer="Trainer", folder=folder, ready=ready)
        finally:
            if self._runs > earlier:  # otherwise it was not started, and the newest run is an earlier one
                copy_logs(folder, self.storage / folder.name)

    def run_iterator(
        self,
        train_func: Callable[..., Any],
        config: Mapping[str, Any] | None = None,
        checkpoint: Any = None,
        checkpoint_strategy: CheckpointConfig | None = None,
        dataset: Any = None,
    ) -> TrainingIterator:
        """Start `train_func`. Return an iterator over what all ranks report, round by round.
        `config`, `checkpoint`, `checkpoint_strategy` and `dataset` are those of `run`."""
        job, manager, ready = self._prepare(train_func, config, *in_order(checkpoint, checkpoint_strategy, dataset))
        rounds = TrainingIterator(self._executor, make_callback_list(None, history=self.history))
        rounds.begin(job, manager, ready=ready)
        return rounds

    def _prepare(
        self, train_func: Any, config: Any, checkpoint: Any, strategy: Any, dataset: Any
    ) -> tuple[FunctionJob, CheckpointManager, Callable[[], None]]:
        """Make the next run of this trainer, what keeps its checkpoints, and what is called when it
        begins."""
        name = f"run_{self._find_next():03d}"
        job = FunctionJob(
            function=train_func,
            config=config,
            checkpoint=checkpoint,
            checkpoint_config=strategy,
            trial={"trial_dir": self.logdir / name},
            shards=make_splits(dataset, cpus_per_worker=self._executor.workers.resources.cpus),
        )
        newest = in_trial.number_of(checkpoint) or 0
        manager = job.make_manager(self.storage / name / "checkpoints", latest_id=newest)
        return job, manager, functools.partial(self._count_run, manager, self.logdir / name)

    def _count_run(self, manager: CheckpointManager, folder: Path) -> None:
        """Count a run that begins, and create its directory."""
        self._runs, self._newest = self._runs + 1, folder
        self.create_run_dir()
        if in_trial.is_trial():
            from raysgd.train.run.trials import TrialReports

            self._to_tune = TrialReports(manager)

    @folding
    def execute(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Compute the values of `func(obj, *args, **kwargs)` with each worker's object, by rank."""
        return self._executor.worker_group.execute_object(func, args, kwargs)

    @folding
    def execute_single(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `func` with these arguments on rank 0 only, and return its value."""
        return self._executor.worker_group.execute_object(func, args, kwargs, only=0)[0]

    def to_tune_trainable(self, train_func: Callable[..., Any], dataset: Any = None) -> Any:
        """Make a Tune Trainable class (extra: tune). Each trial runs `train_func` on workers like
        this trainer's, with the trial's config and its own shards of the `dataset`."""
        if self._executor.is_started:
            raise TrainBackendError(
                "to_tune_trainable() starts workers in each trial: create a new Trainer for it, and do not start it"
            )
        check_function(train_func, None)
        workers = self._executor.workers
        shards = make_splits(dataset, cpus_per_worker=workers.resources.cpus)
        from raysgd.train.run.trials import make_function_trainable

        return make_function_trainable(workers, FunctionJob(function=train_func, shards=shards))

    # -- properties -----------------------------------------------------------------------------------

    @property
    def worker_group(self) -> WorkerGroup:
        """The workers, for plain functions: `trainer.worker_group.execute(fn)`."""
        return self._executor.worker_group

    def __repr__(self) -> str:
        state = "not active" if not self._executor.is_started else "running" if self._executor.is_running else "idle"
        workers = self._executor.workers
        described = f"{type(workers.backend).__name__}, {counted(workers.num_workers, 'worker')}"
        newest = f", newest {self._newest.name}" if self._newest else ""
        return f"Trainer({described}, {self._runs} run{'' if self._runs == 1 else 's'}{newest}, {state})"

    @property
    def recoveries(self) -> list[Recovery]:
        """All recoveries so far: failures, growth, preemptions."""
        return self._executor.recoveries

    @property
    def latest_run_dir(self) -> Path | None:
        """The newest run's directory on this machine, or None before the first run."""
        return self._newest

    @staticmethod
    def create_logdir(log_dir: str | Place | None) -> Place:
        """Create and return `log_dir`, the directory of a trainer's runs."""
        return _make_places(log_dir)[0]

    def create_run_dir(self) -> None:
        """Create the directory of the newest run."""
        if self.latest_run_dir is not None:
            self.latest_run_dir.mkdir(parents=True, exist_ok=True)

    @staticmethod
    def load_checkpoint_from_path(checkpoint_file_path: str | Place) -> dict[str, Any]:
        """Load the dictionary of the checkpoint stored at `checkpoint_file_path`."""
        return Checkpoint.from_uri(checkpoint_file_path).to_dict()

    def _find_next(self) -> int:
        """The number of the next run: other trainers may have made runs here since the last one."""
        return 1 + max(_find_newest_run(self.storage), _find_newest_run(self.logdir))

    @property
    def checkpoint_manager(self) -> CheckpointManager | None:
        return self._executor.checkpoint_manager

    @property
    def best_checkpoint(self) -> dict[str, Any] | None:
        """The best stored checkpoint, by the run's strategy; by default, the newest."""
        path = self.best_checkpoint_path
        return None if path is None else Checkpoint(path, trusted=True).to_dict()


def _make_places(logdir: str | Place | None) -> tuple[Place, Path]:
    """Choose where checkpoints are stored, and where callbacks write."""
    where = None if logdir is None else place(logdir)
    if isinstance(where, Uri):
        return where, create_folder(where.name, "sgd")
    path = create_folder(where, "sgd")
    return path, path


def in_order(checkpoint: Any, checkpoint_strategy: Any, dataset: Any) -> tuple[Any, Any, Any]:
    """Put these arguments of a run in our order, also if they came in that of Ray Train 1.x."""
    if is_dataset(checkpoint) or isinstance(dataset, CheckpointConfig):
        return checkpoint_strategy, dataset, checkpoint
    return checkpoint, checkpoint_strategy, dataset


def _find_newest_run(folder: Place) -> int:
    """Return the number of the newest existing run, whose name no other run may take."""
    numbers = [name.removeprefix("run_") for name in names(folder) if name.startswith("run_")]
    return max((int(number) for number in numbers if number.isdigit()), default=0)
