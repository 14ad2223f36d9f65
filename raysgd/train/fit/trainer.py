"""A training function, its settings and its data in one object: `DataParallelTrainer(...).fit()`."""

from __future__ import annotations

import copy
import functools
import io
import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from raysgd.callbacks.history import History
from raysgd.errors import ConfigError
from raysgd.storage.locations import Uri, place, text_of
from raysgd.train.backends import parse_backend
from raysgd.train.checkpoint import Checkpoint
from raysgd.train.executor import BackendExecutor
from raysgd.train.fit.job import FunctionJob
from raysgd.train.fit.records import Past, can_restore
from raysgd.train.fit.result import Result
from raysgd.train.fit.run import Fitting
from raysgd.train.fit.settings import RunConfig, ScalingConfig
from raysgd.train.run import RunOptions, ShardMaker, task_of
from raysgd.train.shards import make_shards
from raysgd.workers.serialization import pack

__all__ = ["DataParallelTrainer"]

T = TypeVar("T", bound="DataParallelTrainer")
SETTINGS = (
    "train_loop_per_worker",
    "train_loop_config",
    "backend_config",
    "scaling_config",
    "dataset_config",
    "run_config",
    "datasets",
    "metadata",
    "resume_from_checkpoint",
)


TUNABLE = ("train_loop_config", "scaling_config", "datasets", "metadata", "resume_from_checkpoint")


MOVED = {
    "raysgd.train.settings": "raysgd.train.fit.settings",
    "raysgd.train.strategy": "raysgd.train.fit.checkpoint_strategy",
}


class DataParallelTrainer:
    """Runs `train_loop_per_worker` on all workers, and keeps what it reports.

        trainer = DataParallelTrainer(
            train_loop,
            train_loop_config={"epochs": 3},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path="runs"),
        )
        result = trainer.fit()
        print(result.metrics, result.checkpoint)

    It holds settings only: workers are there while `fit()` lasts. Subclass it to fix the loop or the backend.
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
        self._restored_from: str | None = None
        self._set_up: set[str] = set()  # what setup() has made, and makes again: a connection cannot be stored
        self.history = History()  # what was reported in the newest fit() of this process, as a table
        self._check()

    def _check(self) -> None:
        task_of(self.train_loop_per_worker, self.train_loop_config)
        kinds = {"scaling_config": ScalingConfig, "run_config": RunConfig, "datasets": Mapping, "metadata": Mapping}
        for name, kind in kinds.items():
            if not isinstance(getattr(self, name), kind):
                what = "a dict" if kind is Mapping else f"a raysgd.train.{kind.__name__}"
                raise ConfigError(f"{name} must be {what}, got {getattr(self, name)!r}")
        try:
            self.metadata = json.loads(json.dumps(dict(self.metadata)))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"metadata must be plain JSON, to lie beside checkpoints: {error}") from error
        given = self.resume_from_checkpoint
        known = isinstance(given, (Checkpoint, Mapping, str, Path, Uri)) or hasattr(given, "as_directory")
        if given is not None and not known:
            raise ConfigError(
                f"resume_from_checkpoint must be a Checkpoint, a dict, or the path or URI of a stored one, got {given!r}"
            )

    # -- running --------------------------------------------------------------------------------------

    def setup(self) -> None:
        """Called by `fit()`, and in a Tune trial, before the workers start; override it for work that a constructor should not do."""

    def fit(self) -> Result:
        """Runs the function to its end. An error of the function's, or too many losses, is raised; what was saved
        until then stays, and `restore` goes on from there."""
        packed, before = self._packed(), set(vars(self))
        self.setup()
        self._set_up |= set(vars(self)) - before
        restored = place(self._restored_from) if self._restored_from is not None else None
        self.history = History()
        fitting = Fitting(type(self).__name__, self.run_config, self.history, restored=restored)
        return fitting.run(self.job(), packed)

    def job(self) -> FunctionJob:
        """This run, as it would be begun."""
        scaling = self.scaling_config
        worker = scaling.worker
        make = functools.partial(
            BackendExecutor,
            self.backend_config,
            scaling.most,
            worker.cpus,
            worker.gpus,
            worker.custom,
            self.run_config.max_failures,
            elastic=scaling.policy(),
            start_with=scaling.least,
        )
        return FunctionJob(
            make=make,
            function=self.train_loop_per_worker,
            config=dict(self.train_loop_config or {}),
            checkpoint=self.resume_from_checkpoint,
            checkpoint_config=self.run_config.checkpoint_config,
            options=RunOptions(metadata=self.metadata, shards=self._shards()),
        )

    # -- in Tune --------------------------------------------------------------------------------------

    def as_trainable(self) -> Any:
        """A Tune Trainable class; `tune.Tuner` takes the trainer itself too (extra: tune). A trial's config gives arguments
        of the trainer, as `{"train_loop_config": {"lr": 0.1}}`; settings of the loop that it does not name stay."""
        return import_module("raysgd.tune").as_trainable(self)

    def __call__(self, config: dict[str, Any]) -> None:
        """Tune, in a trial: one run with the trial's settings."""
        trainer = self._with(config)
        trainer.setup()
        import_module("raysgd.tune").perform(trainer.job())

    def _resources(self, config: dict[str, Any]) -> Any:
        """Tune reads this of functions: what a trial asks of the cluster."""
        scaling = self._with(config).scaling_config
        return import_module("raysgd.tune").placement(scaling.bundles(), scaling.placement_strategy)

    @property
    def _name(self) -> str:
        """Tune names the trials so."""
        return type(self).__name__

    def _with(self, config: Mapping[str, Any]) -> DataParallelTrainer:
        """A copy with a trial's arguments in it."""
        unknown = sorted(set(config) - set(TUNABLE))
        if unknown:
            raise ConfigError(
                f"param_space names {unknown[0]!r}, which is no argument of {type(self).__name__} that can be tuned; there "
                f"are: {', '.join(TUNABLE)}. What the training function is given goes into 'train_loop_config'"
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
        """A copy of what is said of how data sets are shared out."""
        return copy.deepcopy(self.dataset_config)

    def preprocess_datasets(self) -> None:
        raise DeprecationWarning("trainers do not preprocess data sets: do it with Ray Data, before you pass them")

    def _shards(self) -> ShardMaker | None:
        """Each rank's part of the data sets: all are divided, unless `dataset_config` says otherwise."""
        return make_shards(self.datasets, self.dataset_config, cpus_per_worker=self.scaling_config.worker.cpus)

    def __repr__(self) -> str:
        name = getattr(self.train_loop_per_worker, "__name__", type(self.train_loop_per_worker).__name__)
        count = self.scaling_config.num_workers
        people = f"{count[0]} to {count[1]} workers" if isinstance(count, tuple) else f"{count} worker(s)"
        return f"{type(self).__name__}({name}, {people}, {len(self.history)} reports so far)"

    # -- going on -------------------------------------------------------------------------------------

    @staticmethod
    def can_restore(path: str | Path | Uri) -> bool:
        """Is there a run of `fit()` that can be gone on with?"""
        return can_restore(place(path))

    @classmethod
    def restore(cls: type[T], path: str | Path | Uri, **anew: Any) -> T:
        """The trainer of a run that was interrupted or failed: `fit()` goes on from the newest checkpoint that is
        stored there, in the same directory. Every argument of a trainer can be given anew, the function too; data
        sets must be, and callbacks are forgotten. Settings are pickled, so restore only what you trust."""
        past = Past.read(place(path))
        if past.trainer != cls.__name__:
            raise ConfigError(f"the run at {place(path)} is a {past.trainer}'s: call {past.trainer}.restore(...)")
        unknown = sorted(set(anew) - set(SETTINGS))
        if unknown:
            raise ConfigError(f"restore() knows no argument {unknown[0]!r}; there are: {', '.join(SETTINGS)}")
        names = [name for name in _unpickled(past.settings["datasets"]) if name not in (anew.get("datasets") or {})]
        if names:
            raise ConfigError(
                f"the run at {place(path)} had data sets, which are not stored: pass datasets= with {names}"
            )
        trainer = cls.__new__(cls)
        trainer.datasets, trainer.history, trainer._set_up = {}, History(), set()
        for name, data in past.settings.items():
            if name not in anew and name != "datasets":
                setattr(trainer, name, _unpickled(data))
        for name, value in anew.items():
            setattr(trainer, name, value)
        if isinstance(anew.get("run_config"), RunConfig):
            trainer.run_config = anew["run_config"].completed(_unpickled(past.settings["run_config"]))
        trainer.backend_config = parse_backend(trainer.backend_config)
        trainer._restored_from = text_of(place(path))
        trainer._check()
        return trainer

    def _packed(self) -> dict[str, bytes]:
        """Every attribute but what setup() makes, each pickled by itself; of the data sets their names, and no callbacks."""
        changed = {"datasets": list(self.datasets), "run_config": self.run_config.to_store()}
        left_out = {"history", "_set_up", "_restored_from", *self._set_up}
        return {name: _pickled(value) for name, value in {**vars(self), **changed}.items() if name not in left_out}


def _pickled(value: Any) -> bytes:
    packed = pack((value,))
    assert packed is not None
    return bytes(packed.data)


class _SettingsUnpickler(pickle.Unpickler):
    """Finds the settings in runs that earlier versions have stored, which had them in other modules."""

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(MOVED.get(module, module), name)


def _unpickled(data: bytes) -> Any:
    return _SettingsUnpickler(io.BytesIO(data)).load()[0]
