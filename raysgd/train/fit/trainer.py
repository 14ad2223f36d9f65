"""`DataParallelTrainer`: a training function with its settings and its data. Driver."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from raysgd.callbacks.history import History
from raysgd.errors import ConfigError, counted
from raysgd.ray_data.datasets import DataConfig
from raysgd.storage.locations import copy_logs, place, text_of
from raysgd.storage.remote import Uri
from raysgd.train.backends import parse_backend
from raysgd.train.callbacks import make_callback_list
from raysgd.train.checkpoint import Checkpoint
from raysgd.train.fit.records import RunRecord, StoredRun, can_restore, choose_log_dir, choose_place
from raysgd.train.fit.result import Result
from raysgd.train.run.checkpoint_manager import CheckpointManager
from raysgd.train.run.driver import FunctionDriver, TrainingIterator
from raysgd.train.run.job import FunctionJob, FunctionWorkers, check_function, function_name
from raysgd.train.run.splits import make_splits
from raysgd.train.settings import RunConfig, ScalingConfig, rays_own, without_rays_own
from raysgd.trainer.arguments import check_hook
from raysgd.workers.serialization import pack
from raysgd.workers.tracebacks import folding

T = TypeVar("T", bound="DataParallelTrainer")
TUNABLE = ("train_loop_config", "scaling_config", "datasets", "metadata", "resume_from_checkpoint")


@without_rays_own
class DataParallelTrainer:
    """Runs `train_loop_per_worker` on all workers, and stores what it reports.

        trainer = DataParallelTrainer(
            train_loop,
            train_loop_config={"epochs": 3},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path="runs"),
        )
        result = trainer.fit()
        print(result.metrics, result.checkpoint)

    train_loop_per_worker   a function without parameters, or with one for the config; each worker
                            calls it
    train_loop_config       the config
    scaling_config          a `ScalingConfig`: the workers
    run_config              a `RunConfig`: where the run is stored, what is kept, and callbacks
    backend_config          a `BackendConfig`; the subclasses of this class preset it
    datasets                Ray Datasets by name, for `train.get_dataset_shard(name)`
    dataset_config          a `DataConfig`: which of them are divided among the workers
    metadata                plain JSON, which is added to the metadata of each checkpoint
    resume_from_checkpoint  what `train.get_checkpoint()` returns at first
    initialization_hook     a function that each worker calls once when it starts, before it joins
                            the others: they need not wait for what it imports

    It holds only settings: workers exist only during `fit()`. Subclass it to preset the loop or the
    backend.
    """

    _dataset_config: ClassVar[Any] = None

    def __init__(
        self,
        train_loop_per_worker: Callable[..., Any],
        *,
        train_loop_config: Mapping[str, Any] | None = None,
        backend_config: Any = None,
        scaling_config: ScalingConfig | None = None,
        dataset_config: Any = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
        resume_from_checkpoint: Any = None,
        initialization_hook: Callable[[], Any] | None = None,
    ) -> None:
        self.train_loop_per_worker = train_loop_per_worker
        self.train_loop_config = train_loop_config
        self.backend_config = parse_backend(backend_config)
        self.scaling_config = scaling_config if scaling_config is not None else ScalingConfig()
        self.dataset_config = dataset_config if dataset_config is not None else type(self)._dataset_config
        self.run_config = run_config if run_config is not None else RunConfig()
        self.datasets = datasets if datasets is not None else {}
        self.metadata = metadata if metadata is not None else {}
        self.resume_from_checkpoint = resume_from_checkpoint
        self.initialization_hook = initialization_hook
        self._restored_from: str | None = None
        self._overridden = False  # whether restore() got the checkpoint to resume from
        self._set_up: set[str] = set()  # attributes that setup() creates, which are not stored
        self.history = History()  # the reports of the newest fit() in this process
        self._check()

    def _check(self) -> None:
        check_function(self.train_loop_per_worker, self.train_loop_config)
        check_hook(self.initialization_hook)
        kinds = {"scaling_config": ScalingConfig, "run_config": RunConfig, "datasets": Mapping, "metadata": Mapping}
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                what = "a dict" if kind is Mapping else f"a raysgd.train.{kind.__name__}"
                value = getattr(self, name)
                raise ConfigError(f"{name} must be {what}, got {value!r}{rays_own(value)}")
        try:
            self.metadata = json.loads(json.dumps(dict(self.metadata)))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"metadata must be plain JSON, because it is stored with checkpoints: {error}") from error
        value = self.resume_from_checkpoint
        known = isinstance(value, (Checkpoint, Mapping, str, Path, Uri)) or hasattr(value, "as_directory")
        if value is not None and not known:
            raise ConfigError(
                f"resume_from_checkpoint must be a Checkpoint, a dict, or the path or URI of a stored one, got {value!r}"
            )

    # -- running --------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Called by `fit()` and in trials before the workers start, for work beyond the
        constructor."""

    @folding
    def fit(self) -> Result:
        """Run the function to its end. Raise the function's error, or TrainingWorkerError after too
        many worker failures. Checkpoints that were saved before remain, and `restore` resumes from
        the newest one."""
        packed, before = self._pack_settings(), set(vars(self))
        self.setup()
        self._set_up |= set(vars(self)) - before
        self.history = History()
        # These first, because invalid callbacks and settings must not leave a directory behind.
        executor, job = FunctionDriver(self._workers()), self.job()
        callbacks = make_callback_list(self.run_config.callbacks, history=self.history)
        record, manager = self._open_record(job)
        record.begin(packed)
        try:
            executor.start(job.hook)
            record.note_start()
            job, folder = replace(job, trial=record.trial(), record=record.add), record.log_dir
            rounds = TrainingIterator(executor, callbacks)
            values = rounds.run_to_end(job, manager, trainer=record.trainer, folder=folder)
            record.end(None)
        except BaseException as error:
            record.fail(error)
            raise
        finally:
            executor.shutdown()
            copy_logs(record.log_dir, record.where)
        return Result.of(record.where, manager, record.rows, log_dir=record.log_dir, return_values=values)

    def _open_record(self, job: FunctionJob) -> tuple[RunRecord, CheckpointManager]:
        """Take a new directory, or that of the restored run, with its checkpoints and reports."""
        name, past = type(self).__name__, None
        if self._restored_from is None:
            where, log_dir = choose_place(name, self.run_config)
        else:
            where = place(self._restored_from)
            past, log_dir = StoredRun.read(where), choose_log_dir(where, resume=True)
        record, manager = RunRecord(where, log_dir, name, job.config, past), job.make_manager(where)
        if past is not None:
            initial = manager.payload
            manager.adopt(past.metrics_by_checkpoint())
            manager.payload = initial if self._overridden else manager.payload
        return record, manager

    def job(self) -> FunctionJob:
        """The run that `fit()` would start."""
        return FunctionJob(
            function=self.train_loop_per_worker,
            config=dict(self.train_loop_config or {}),
            checkpoint=self.resume_from_checkpoint,
            hook=self.initialization_hook,
            checkpoint_config=self.run_config.checkpoint_config,
            metadata=self.metadata,
            shards=make_splits(self.datasets, self.dataset_config, cpus_per_worker=self.scaling_config.worker.cpus),
        )

    def _workers(self) -> FunctionWorkers:
        scaling, most = self.scaling_config, self.run_config.max_failures
        return FunctionWorkers(
            self.backend_config, scaling.most, scaling.worker, most, scaling.policy(), start_with=scaling.least
        )

    # -- in Tune --------------------------------------------------------------------------------------

    def as_trainable(self) -> Any:
        """Make a Tune Trainable class (extra: tune); `tune.Tuner` accepts the trainer itself too. A
        trial's config holds arguments of the trainer, such as `{"train_loop_config": {"lr": 0.1}}`,
        which is merged into the loop's config."""
        from raysgd.train.run.trials import as_trainable

        return as_trainable(self)

    def __call__(self, config: dict[str, Any]) -> None:
        """Run the function with a trial's config. Tune calls this in the trial."""
        from raysgd.train.run.trials import perform

        trainer = self._with(config)
        trainer.setup()
        perform(trainer._workers(), trainer.job())

    def _resources(self, config: dict[str, Any]) -> Any:
        """The resources of a trial. Tune looks for this attribute of functions."""
        from raysgd.train.run.trials import make_placement

        scaling = self._with(config).scaling_config
        return make_placement(scaling.bundles(), scaling.placement_strategy)

    @property
    def _name(self) -> str:
        """The name that Tune gives the trials."""
        return type(self).__name__

    def _with(self, config: Mapping[str, Any]) -> DataParallelTrainer:
        """Make a copy with the arguments of a trial's config."""
        unknown = sorted(set(config) - set(TUNABLE))
        if unknown:
            raise ConfigError(
                f"param_space names {unknown[0]!r}, which is not an argument of {type(self).__name__} that can be tuned. These "
                f"can: {', '.join(TUNABLE)}. Put values for the training function into 'train_loop_config'"
            )
        trainer = copy.copy(self)
        for name, value in config.items():
            setattr(trainer, name, value)
        if isinstance(trainer.scaling_config, Mapping):
            trainer.scaling_config = replace(self.scaling_config, **trainer.scaling_config)
        trainer.train_loop_config = {**(self.train_loop_config or {}), **(trainer.train_loop_config or {})}
        trainer._check()
        return trainer

    # -- data -----------------------------------------------------------------------------------------

    def get_dataset_config(self) -> Any:
        """A copy of `dataset_config`, by default a `DataConfig()`."""
        return copy.deepcopy(DataConfig() if self.dataset_config is None else self.dataset_config)

    def preprocess_datasets(self) -> None:
        raise DeprecationWarning("trainers do not preprocess datasets: do it with Ray Data before you pass them")

    def __repr__(self) -> str:
        name = function_name(self.train_loop_per_worker)
        count = self.scaling_config.num_workers
        workers = f"{count[0]} to {count[1]} workers" if isinstance(count, tuple) else counted(count, "worker")
        return f"{type(self).__name__}({name}, {workers}, {counted(len(self.history), 'report')} so far)"

    # -- restoring ------------------------------------------------------------------------------------

    @staticmethod
    def can_restore(path: str | Path | Uri) -> bool:
        """Whether there is a run of `fit()` at `path` that can be resumed."""
        return can_restore(place(path))

    @classmethod
    def restore(
        cls: type[T],
        path: str | Path | Uri,
        train_loop_per_worker: Callable[..., Any] | None = None,
        train_loop_config: Mapping[str, Any] | None = None,
        **overrides: Any,
    ) -> T:
        """Restore the trainer of the run at `path`, which was interrupted or failed. Its `fit()`
        resumes from the newest stored checkpoint, in the same directory. Every argument can be
        overridden, `train_loop_per_worker`, `train_loop_config` and that checkpoint too. Datasets
        must be passed again, and callbacks are not restored. The settings are pickled, so restore
        only runs that you trust."""
        named = {"train_loop_per_worker": train_loop_per_worker, "train_loop_config": train_loop_config}
        overrides |= {name: value for name, value in named.items() if value is not None}
        past = StoredRun.read(place(path))
        if past.trainer != cls.__name__:
            raise ConfigError(f"the run at {place(path)} belongs to a {past.trainer}: call {past.trainer}.restore(...)")
        settings = list(inspect.signature(DataParallelTrainer).parameters)
        unknown = sorted(set(overrides) - set(settings))
        if unknown:
            raise ConfigError(f"restore() has no argument {unknown[0]!r}; it takes {', '.join(settings)}")
        names = [name for name in _unpickle(past.settings["datasets"]) if name not in (overrides.get("datasets") or {})]
        if names:
            raise ConfigError(
                f"the run at {place(path)} used datasets, which are not stored: pass datasets= with {names}"
            )
        trainer = cls.__new__(cls)
        trainer.datasets, trainer.history, trainer._set_up = {}, History(), set()
        for name, data in past.settings.items():
            if name not in overrides and name != "datasets":
                setattr(trainer, name, _unpickle(data))
        for name, value in overrides.items():
            setattr(trainer, name, value)
        if isinstance(overrides.get("run_config"), RunConfig):
            trainer.run_config = overrides["run_config"].complete_from(_unpickle(past.settings["run_config"]))
        trainer.backend_config = parse_backend(trainer.backend_config)
        trainer._restored_from = text_of(place(path))
        trainer._overridden = overrides.get("resume_from_checkpoint") is not None
        trainer._check()
        return trainer

    def _pack_settings(self) -> dict[str, bytes]:
        """Pickle each attribute, but not those of setup(). Of datasets, store only the names."""
        changed = {"datasets": list(self.datasets), "run_config": self.run_config.to_store()}
        left_out = {"history", "_set_up", "_restored_from", "_overridden", *self._set_up}
        return {name: _pickle(value) for name, value in {**vars(self), **changed}.items() if name not in left_out}


def _pickle(value: Any) -> bytes:
    packed = pack((value,))
    assert packed is not None
    return bytes(packed.data)


def _unpickle(data: bytes) -> Any:
    return pickle.loads(data)[0]
