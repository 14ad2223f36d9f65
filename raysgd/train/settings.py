"""The settings of `DataParallelTrainer`: scaling, failures, checkpoints, run. Both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from pathlib import Path
from typing import Any, Literal, TypeVar

from raysgd.callbacks.early_stopping import warn_of_mode
from raysgd.config import ElasticConfig, WorkerResources, check_flags, object_of, one_of
from raysgd.core.measures.metrics import cost, plain
from raysgd.errors import ConfigError, suggesting_fields
from raysgd.storage.masking import mask

C = TypeVar("C", bound=type)
# The default limit for hangs. It is long, because raysgd does not know how long the steps of a function take.
HANG_S = 1800.0
DEFAULT_ELASTIC = ElasticConfig(hang_timeout_s=HANG_S)
TIMESTAMP = "_timestamp"
# Arguments of Ray's classes, and of raysgd's other trainers, that these do not have, and what to do instead.
ENDS = (
    "the workers of a training function end with the script. Report checkpoints in the function, and resume from the newest "
    "one in the next script: run(..., checkpoint=path), or restore(path).fit()"
)
REPORTED = "a checkpoint is stored whenever the training function reports or saves one"
INSTEAD = {
    **dict.fromkeys(("num_workers", "use_gpu"), "pass scaling_config=ScalingConfig(num_workers=..., use_gpu=...)"),
    "accelerator_type": 'request it with resources_per_worker={"accelerator_type:T4": 0.001}',
    "checkpoint_at_end": REPORTED,
    "checkpoint_frequency": REPORTED,
    "fail_fast": "an error in the function always ends the run",
    "log_to_file": "use callbacks",
    "name": ENDS,
    "orphan_s": ENDS,
    "progress_reporter": "use callbacks",
    "stop": "the training function decides: return from it, or raise in a callback that stops_training",
    "sync_config": "storage_path may be a URI",
    "training_operator_cls": "operators are for raysgd.TorchTrainer and raysgd.TFTrainer",
    "verbose": "use callbacks=[PrintCallback()]",
}


def without_rays_own(kind: C) -> C:
    """Let a class say what to do about arguments that only Ray's, or raysgd's other classes,
    have."""
    return suggesting_fields(kind, instead=INSTEAD)


@without_rays_own
@dataclass(frozen=True)
class ScalingConfig:
    """How many workers there are, and which resources each has.

    num_workers           a number, or (min, max): as many of max as the cluster has room for, and
                          never fewer than min
    use_gpu               one GPU for each worker
    resources_per_worker  {"CPU": 2, "special": 1}: overrides the default of one CPU, and use_gpu's
                          GPU, by name
    trainer_resources     the resources of a Tune trial's coordinator; one CPU by default
    placement_strategy    the strategy of a Tune trial's placement group
    elastic               an ElasticConfig; the minimum of num_workers overrides its min_workers
    """

    num_workers: int | tuple[int, int] = 1
    use_gpu: bool = False
    resources_per_worker: Mapping[str, float] | None = None
    trainer_resources: Mapping[str, float] | None = None
    placement_strategy: str = "PACK"
    elastic: ElasticConfig | None = None

    def __post_init__(self) -> None:
        if isinstance(self.num_workers, list):
            object.__setattr__(self, "num_workers", tuple(self.num_workers))
        _check_num_workers(self.num_workers)
        check_flags(use_gpu=self.use_gpu)
        one_of("placement_strategy", self.placement_strategy, "PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
        object_of(ElasticConfig, "elastic", self.elastic)
        _ = self.worker, WorkerResources.parse(1, False, self.trainer_resources)  # raise for invalid resources

    @property
    def most(self) -> int:
        """How many workers there should be."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[1]

    @property
    def least(self) -> int | None:
        """With how many workers training may begin, if that is fewer than all."""
        return None if isinstance(self.num_workers, int) else self.num_workers[0]

    @property
    def worker(self) -> WorkerResources:
        return WorkerResources.parse(1, self.use_gpu, self.resources_per_worker, gpu_asked=self.use_gpu)

    def policy(self) -> ElasticConfig:
        """The elastic policy of these settings."""
        elastic = self.elastic or DEFAULT_ELASTIC
        return elastic if self.least is None else replace(elastic, min_workers=self.least)

    def bundles(self) -> list[dict[str, float]]:
        """The bundles of a Tune trial: the coordinator's, then each worker's."""
        return [dict(self.trainer_resources or {"CPU": 1}), *(self.worker.as_dict() for _ in range(self.most))]


def _check_num_workers(count: Any) -> None:
    numbers = count if isinstance(count, tuple) else (count,)
    positive = all(isinstance(number, int) and not isinstance(number, bool) and number >= 1 for number in numbers)
    pair = isinstance(count, tuple)
    if not positive or (pair and (len(count) != 2 or count[0] > count[1])):
        raise ConfigError(
            f"num_workers must be an integer of at least 1, or (min, max) with 1 <= min <= max, got {count!r}"
        )


@without_rays_own
@dataclass(frozen=True)
class FailureConfig:
    """A run survives `max_failures` worker failures (-1: any), and no error of its function."""

    max_failures: int = 3

    def __post_init__(self) -> None:
        check_failure_limit("max_failures", self.max_failures)


def check_failure_limit(name: str, limit: Any) -> None:
    """Raise ConfigError unless this is a number of worker failures, or -1."""
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < -1:
        raise ConfigError(
            f"{name} must be a number of worker failures of at least 0, or -1 for no limit, got {limit!r}"
        )


@without_rays_own
@dataclass(frozen=True)
class CheckpointConfig:
    """How many checkpoints of a run stay in storage, and which ones.

    num_to_keep                 None: all; 0: none, only the newest one is kept in memory; k: the
                                best k
    checkpoint_score_attribute  the number that ranks checkpoints: a value in the checkpoint, or
                                else in the metrics reported with it. None: the time, so the newest
                                ones are kept
    checkpoint_score_order      "max" or "min": whether a larger or a smaller number is better
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        keep = self.num_to_keep
        if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 0):
            raise ConfigError(
                f"num_to_keep must be None (all), 0 (none in storage) or a number of checkpoints, got {keep!r}"
            )
        one_of("checkpoint_score_order", self.checkpoint_score_order, "max", "min")
        name = self.checkpoint_score_attribute
        if name is not None and (not isinstance(name, str) or not name):
            raise ConfigError(
                "checkpoint_score_attribute must be the name of a number in the checkpoint or in the metrics, or None to "
                f"keep the newest, got {name!r}"
            )
        what = f"{type(self).__name__}(checkpoint_score_attribute={name!r}) keeps the checkpoint with"
        warn_of_mode(what, name or "", self.checkpoint_score_order, "checkpoint_score_order")

    @property
    def by_time(self) -> bool:
        return self.checkpoint_score_attribute in (None, TIMESTAMP)

    def score(self, checkpoint: dict[str, Any], metrics: dict[str, Any]) -> float:
        """Compute a score of which larger is better, in either order. NaN is the worst."""
        name = self.checkpoint_score_attribute
        assert name is not None, "the manager scores by time itself"
        value = plain(checkpoint.get(name, metrics.get(name)))  # a number may be a tensor of one element
        if not isinstance(value, Real) or isinstance(value, bool):
            names = sorted({*checkpoint, *metrics})
            raise ConfigError(
                f"checkpoint_score_attribute {name!r} must be a number in every checkpoint, or in the metrics reported "
                f"with it; got {value!r} (found: {', '.join(names)})"
            )
        return -cost(float(value), self.checkpoint_score_order)


@without_rays_own
@dataclass(frozen=True)
class CheckpointStrategy(CheckpointConfig):
    """A `CheckpointConfig` under the name that `Trainer.run(checkpoint_strategy=...)` uses. Both
    classes are accepted everywhere. `num_to_keep` and `checkpoint_score_order` are the same;
    `checkpoint_score_attribute` is the time by default."""

    checkpoint_score_attribute: str | None = TIMESTAMP


def check_strategy(strategy: Any) -> None:
    if strategy is not None and not isinstance(strategy, CheckpointConfig):
        wanted = "a raysgd.train.CheckpointStrategy or CheckpointConfig"
        raise ConfigError(f"checkpoint_strategy must be {wanted}, got {strategy!r}{rays_own(strategy)}")


def rays_own(value: Any) -> str:
    """What to do about Ray's own class of this name, whose defaults are others."""
    name = type(value).__name__
    if not type(value).__module__.startswith("ray.") or name not in globals():
        return ""
    return f". This is Ray's own class, whose fields and defaults differ from those of raysgd: from raysgd.train import {name}"


@without_rays_own
@dataclass(frozen=True)
class RunConfig:
    """Where a run is stored, what is kept, and which callbacks it has.

    name               its directory; by default the trainer's name and the time
    storage_path       the parent directory, which may be a URI; by default ~/ray_results
    failure_config     a FailureConfig
    checkpoint_config  a CheckpointConfig
    callbacks          called with every round of reports
    """

    name: str | None = None
    storage_path: str | Path | None = None
    failure_config: FailureConfig | None = None
    checkpoint_config: CheckpointConfig | None = None
    callbacks: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        if self.name is not None and (not isinstance(self.name, str) or not self.name or "/" in self.name):
            raise ConfigError(f"RunConfig's name must be the name of a directory, without '/', got {self.name!r}")
        if self.storage_path is not None and not isinstance(self.storage_path, (str, Path)):
            raise ConfigError(f"storage_path must be a directory or a URI, got {self.storage_path!r}")
        kinds = {"failure_config": FailureConfig, "checkpoint_config": CheckpointConfig}
        for name, kind in kinds.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise ConfigError(f"{name} must be a raysgd.train.{kind.__name__}, got {value!r}{rays_own(value)}")

    def __copy__(self) -> RunConfig:
        """Raise an error in `ray.tune.Tuner`, which would copy and change its settings."""
        raise ConfigError(
            "raysgd.train.RunConfig cannot be copied. If you passed it to ray.tune.Tuner, pass Tune's own settings there: "
            "run_config=ray.tune.RunConfig(name=..., storage_path=...). To change one setting, use dataclasses.replace"
        )

    def to_store(self) -> RunConfig:
        """Make a copy without callbacks and secrets: `restore` is given the path again."""
        masked = mask(self.storage_path) if isinstance(self.storage_path, str) else self.storage_path
        return replace(self, callbacks=None, storage_path=masked)

    def __repr__(self) -> str:
        shown = {**vars(self), "storage_path": self.to_store().storage_path}
        return f"RunConfig({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def complete_from(self, stored: RunConfig) -> RunConfig:
        """Make a copy that takes what it does not set from an earlier run's settings."""
        names = ("checkpoint_config", "failure_config")
        return replace(self, **{name: getattr(stored, name) for name in names if getattr(self, name) is None})

    @property
    def max_failures(self) -> int:
        return (self.failure_config or FailureConfig()).max_failures
