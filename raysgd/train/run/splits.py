"""Splits Ray Datasets among the ranks of a training function, again for each attempt. Driver."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from raysgd.ray_data.datasets import DataConfig, named_datasets, parse_data_config
from raysgd.workers.cluster.foreign import split_coordinator
from raysgd.workers.cluster.nodes import end_actor, warn_no_room_for_data


class DatasetSplits:
    """Owns the splits of one attempt. For each split Ray starts an actor that waits until *all*
    readers have connected, which a failed reader never does. So splits are not reused: the next
    attempt gets new ones, and the old actors are ended, which also frees readers that still wait
    for them."""

    def __init__(self, datasets: Mapping[str, Any], rules: Any, *, cpus_per_worker: float = 1) -> None:
        self._datasets, self._rules, self._cpus = dict(datasets), rules, cpus_per_worker
        self._open: list[Any] = []
        self._warned = False

    def __call__(self, world_size: int, nodes: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Make the data sets of each rank by name. `nodes` are the nodes of the ranks."""
        self.close()
        if not self._warned and all(type(each).__name__ != "MaterializedDataset" for each in self._datasets.values()):
            self._warned = warn_no_room_for_data(nodes, self._cpus, ", ".join(self._datasets))
        shards = self._split(world_size, list(nodes))
        self._open = [each for rank in shards for each in rank.values()]
        return shards

    def close(self) -> None:
        """End the actors of the splits, which are no longer read."""
        handles = {id(h): h for each in self._open if (h := split_coordinator(each)) is not None}
        self._open = []
        for handle in handles.values():
            end_actor(handle)

    def _split(self, world_size: int, nodes: list[str]) -> list[dict[str, Any]]:
        hints = nodes if len(nodes) == world_size and all(nodes) else None
        if callable(getattr(self._rules, "configure", None)):  # Ray's own DataConfig, or a subclass of it
            result: list[dict[str, Any]] = self._rules.configure(self._datasets, world_size, None, hints)
            return result
        rules: DataConfig = self._rules
        shards: list[dict[str, Any]] = [{} for _ in range(world_size)]
        for name, dataset in self._datasets.items():
            options = rules.options_for(name)
            if options is not None:
                dataset.context.execution_options = copy.deepcopy(options)
            parts = [dataset] * world_size
            if rules.splits(name):
                local = hints if rules.enable_shard_locality else None
                parts = dataset.streaming_split(world_size, equal=rules.equal, locality_hints=local)
            for rank, part in zip(shards, parts, strict=True):
                rank[name] = part
        return shards


def make_splits(datasets: Any, config: Any = None, *, cpus_per_worker: float = 1) -> DatasetSplits | None:
    """Make what splits the datasets for each attempt of a run, or None without datasets. `datasets`
    is a Ray Dataset, or a dict of them by name."""
    named = named_datasets(datasets)
    if not named:
        return None
    return DatasetSplits(named, parse_data_config(config, list(named)), cpus_per_worker=cpus_per_worker)
