"""A configured run of a training function that has not started: `fit()` starts it here, Tune in a trial. Driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from raysgd.ray_data.splits import DatasetSplits
from raysgd.train.checkpoint_manager import CheckpointManager
from raysgd.train.datasets import named_datasets, parse_data_config
from raysgd.train.executor import BackendExecutor
from raysgd.train.fit.settings import CheckpointConfig
from raysgd.train.run import RunOptions, payload_of
from raysgd.workers.serialization import dumps

__all__ = ["FunctionJob", "make_shards"]

BEFORE_FIRST = -1  # fit() and trials count checkpoints from 0


@dataclass(frozen=True, kw_only=True)
class FunctionJob:
    """`make` creates the executor without starting it. `checkpoint` is what the function starts from."""

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
        run_dir: Path,
        manager: CheckpointManager,
        trial: Mapping[str, Any],
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the function on workers that are running, and return at once. `ready` is called right before that."""
        options = replace(self.options, trial={**self.options.trial, **trial})
        executor.start_training(
            self.function, run_dir, config=self.config, options=options, manager=manager, ready=ready
        )


def make_shards(datasets: Any, config: Any = None, *, cpus_per_worker: float = 1) -> DatasetSplits | None:
    """Return what splits the datasets for each attempt of a run (`RunOptions(shards=...)`), or None without datasets.
    `datasets` is a Ray Dataset, or a dict of them by name."""
    named = named_datasets(datasets)
    if not named:
        return None
    return DatasetSplits(named, parse_data_config(config, list(named)), cpus_per_worker=cpus_per_worker)
