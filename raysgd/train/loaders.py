"""Data loaders of training functions: each rank's part, on its device; and one that survives a change of ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from raysgd.core.ranks import RankInfo
from raysgd.errors import ConfigError
from raysgd.torch.data.loading import LoaderIterator
from raysgd.torch.data.sampling import is_planned
from raysgd.torch.data.sources import PlannedSource
from raysgd.torch.parts import move

__all__ = ["ElasticLoader", "PreparedLoader", "distributed"]


def distributed(loader: DataLoader[Any], rank_info: RankInfo) -> DataLoader[Any]:
    """The user's loader, option by option, over this rank's part. Samplers of the user's own are left alone."""
    if isinstance(loader.dataset, IterableDataset) or isinstance(loader.sampler, DistributedSampler):
        return loader
    if loader.batch_size is None:
        return loader
    shuffles = isinstance(loader.sampler, RandomSampler)
    if not shuffles and not isinstance(loader.sampler, SequentialSampler):
        raise ConfigError(
            f"the loader has a sampler of its own ({type(loader.sampler).__name__}), which cannot be divided over "
            f"{rank_info.world_size} workers: pass add_dist_sampler=False and divide it yourself, or leave the sampler out"
        )
    sampler: DistributedSampler[Any] = DistributedSampler(
        loader.dataset,
        num_replicas=rank_info.world_size,
        rank=rank_info.world_rank,
        shuffle=shuffles,
        drop_last=loader.drop_last,
    )
    twin = copy.copy(loader)
    # DataLoader forbids exchanging its sampler by assignment; only these entries depend on it.
    batches = torch.utils.data.BatchSampler(sampler, loader.batch_size, loader.drop_last)
    twin.__dict__.update(sampler=sampler, batch_sampler=batches, _iterator=None)
    return twin


class PreparedLoader:
    """A loader whose batches are on the device. A new epoch is a new order, also when nobody calls `set_epoch`. The
    function runs again when a process of the loader dies."""

    def __init__(self, loader: DataLoader[Any], device: torch.device | None) -> None:
        self.loader, self._device = loader, device
        self._epoch = 0

    def __iter__(self) -> Iterator[Any]:
        sampler = self.loader.sampler
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(max(self._epoch, sampler.epoch))
            self._epoch = sampler.epoch + 1
        for batch in LoaderIterator(self.loader):
            yield batch if self._device is None else move(batch, self._device)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        """`dataset`, `batch_size`, `sampler` and the others are the user's loader's."""
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


class ElasticLoader:
    """Owns an epoch's order and how many of its samples the loop has been given. Part of `train.elastic`'s state: after
    a change of workers the rest of the epoch is dealt anew, and each sample is used exactly once."""

    def __init__(self, loader: DataLoader[Any], rank_info: RankInfo, device: torch.device | None) -> None:
        if not is_planned(loader):
            raise ConfigError(f"elastic_data_loader takes a DataLoader over a map-style data set, got {loader!r}")
        self._source = PlannedSource(loader, pad=True)
        self._rank_info, self._device = rank_info, device
        self.epochs_begun = 0
        self._offset = 0
        self._open = False

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch that is open, else a new one."""
        if not self._open:
            self.epochs_begun += 1
            self._source.begin(self.epochs_begun - 1, self._rank_info, self._rank_info.world_size > 1)
            self._offset, self._open = 0, True
        for drawn in self._source.batches(self._rank_info, self._offset):
            self._offset = drawn.offset
            yield drawn.batch if self._device is None else move(drawn.batch, self._device)
        self._open = False

    def __len__(self) -> int:
        """Batches that are left of the open epoch, for each rank."""
        return self._source.steps_left(self._rank_info, self._offset) if self._open else len(self._source.loader)

    def state_dict(self) -> dict[str, Any]:
        position = {"epochs_begun": self.epochs_begun, "offset": self._offset, "open": self._open}
        return {**position, "source": self._source.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epochs_begun, self._offset, self._open = state["epochs_begun"], state["offset"], state["open"]
        self._source.load(state["source"])
