"""From the user's data sets to what makes each rank's part of them, for every attempt of a run."""

from __future__ import annotations

from typing import Any

from raysgd.ray_data.splits import DatasetSplits
from raysgd.train.datasets import named_datasets, parse_data_config

__all__ = ["make_shards"]


def make_shards(datasets: Any, config: Any = None, *, cpus_per_worker: float = 1) -> DatasetSplits | None:
    """`datasets` is a Ray Dataset, or a dict of them by name; None when there are none. What it returns is what
    `RunOptions(shards=...)` takes."""
    named = named_datasets(datasets)
    if not named:
        return None
    return DatasetSplits(named, parse_data_config(config, list(named)), cpus_per_worker=cpus_per_worker)
