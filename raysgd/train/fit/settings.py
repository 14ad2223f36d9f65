"""How a training function is scaled, run and kept alive: the settings of `DataParallelTrainer` and its kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raysgd.config import ElasticConfig, WorkerResources
from raysgd.errors import ConfigError
from raysgd.storage.masking import mask
from raysgd.train.fit.checkpoint_strategy import CheckpointConfig
from raysgd.train.hints import hints

__all__ = ["FailureConfig", "RunConfig", "ScalingConfig"]

STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")
HANG_S = 1800.0  # nobody knows when a function's step is done, so a hang is told late


@hints(accelerator_type='ask for it by resources_per_worker={"accelerator_type:T4": 0.001}')
@dataclass(frozen=True)
class ScalingConfig:
    """How many workers, and what each holds.

    num_workers           a number, or (min, max): as many of max as there is room for, and never fewer than min
    use_gpu               a GPU for each worker
    resources_per_worker  {"CPU": 2, "special": 1}: overrides one CPU and `use_gpu`'s GPU, by name
    trainer_resources     what the coordinator of a Tune trial holds; one CPU if nothing is said
    placement_strategy    how a Tune trial's workers are placed together
    elastic               an ElasticConfig; the minimum of a pair goes before its min_workers
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
        _check_count(self.num_workers)
        if not isinstance(self.use_gpu, bool):
            raise ConfigError(f"use_gpu must be True or False, got {self.use_gpu!r}")
        if self.placement_strategy not in STRATEGIES:
            raise ConfigError(
                f"placement_strategy must be one of {', '.join(STRATEGIES)}, got {self.placement_strategy!r}"
            )
        if self.elastic is not None and not isinstance(self.elastic, ElasticConfig):
            raise ConfigError(f"elastic must be a raysgd.ElasticConfig, got {self.elastic!r}")
        _ = self.worker, WorkerResources.parse(1, False, self.trainer_resources)

    @property
    def most(self) -> int:
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[1]

    @property
    def least(self) -> int | None:
        """What training may begin with, if that is fewer than all."""
        return None if isinstance(self.num_workers, int) else self.num_workers[0]

    @property
    def worker(self) -> WorkerResources:
        return WorkerResources.parse(1, self.use_gpu, self.resources_per_worker, gpu_asked=self.use_gpu)

    def policy(self) -> ElasticConfig:
        """The elastic policy that this means."""
        elastic = self.elastic or ElasticConfig(hang_timeout_s=HANG_S)
        return elastic if self.least is None else replace(elastic, min_workers=self.least)

    def bundles(self) -> list[dict[str, float]]:
        """What a Tune trial asks of the cluster: the coordinator's share, then each worker's."""
        return [dict(self.trainer_resources or {"CPU": 1}), *(self.worker.as_dict() for _ in range(self.most))]


@hints(fail_fast="an error of the function's always ends the run")
@dataclass(frozen=True)
class FailureConfig:
    """How many losses of workers a run survives, in the processes that are left; -1: any number. An error of the
    function's own is never tried again."""

    max_failures: int = 3

    def __post_init__(self) -> None:
        if not isinstance(self.max_failures, int) or isinstance(self.max_failures, bool) or self.max_failures < -1:
            raise ConfigError(
                f"max_failures must be a whole number of losses, or -1 for no bound, got {self.max_failures!r}"
            )


@hints(
    verbose="use callbacks=[PrintCallback()]",
    stop="the training function decides: return from it, or raise in a callback that stops_training",
    local_dir="use storage_path",
    log_to_file="use callbacks",
    progress_reporter="use callbacks",
    sync_config="storage_path may be a URI",
)
@dataclass(frozen=True)
class RunConfig:
    """Where a run is written, what stays of it, and who hears of it.

    name               its directory; by default the trainer's name and the time
    storage_path       in which directory, or under which URI, that lies; by default ~/ray_results
    failure_config     a FailureConfig
    checkpoint_config  a CheckpointConfig
    callbacks          told of every round of reports
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
            given = getattr(self, name)
            if given is not None and not isinstance(given, kind):
                raise ConfigError(f"{name} must be a raysgd.train.{kind.__name__}, got {given!r}")

    def to_store(self) -> RunConfig:
        """Without callbacks, and without the secrets of a URI: a run that is restored is told where it is."""
        shown = mask(self.storage_path) if isinstance(self.storage_path, str) else self.storage_path
        return replace(self, callbacks=None, storage_path=shown)

    def __repr__(self) -> str:
        shown = {**vars(self), "storage_path": self.to_store().storage_path}
        return f"RunConfig({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def completed(self, stored: RunConfig) -> RunConfig:
        """With what an earlier run was given, where this says nothing."""
        kept = self.checkpoint_config or stored.checkpoint_config
        return replace(self, checkpoint_config=kept, failure_config=self.failure_config or stored.failure_config)

    @property
    def max_failures(self) -> int:
        return (self.failure_config or FailureConfig()).max_failures


def _check_count(count: Any) -> None:
    numbers = count if isinstance(count, tuple) else (count,)
    whole = all(isinstance(number, int) and not isinstance(number, bool) and number >= 1 for number in numbers)
    pair = isinstance(count, tuple)
    if not whole or (pair and (len(count) != 2 or count[0] > count[1])):
        raise ConfigError(
            f"num_workers must be a whole number of at least 1, or (min, max) with 1 <= min <= max, got {count!r}"
        )
