"""Divide an IterableDataset among ranks, by worker info or its own `shard` method. Worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from raysgd.core.ranks import RankInfo
from raysgd.torch.foreign import loader_with, worker_info, worker_info_seen_as

# Their data sets divide themselves among ranks, so that they must see the worker info of their own rank.
DIVIDE_THEMSELVES = {"litdata", "streaming", "webdataset"}


def sharded_live(loader: Iterable[Any], rank_info: RankInfo) -> Iterable[Any]:
    """Return a loader of this rank's part of the stream.

    Data sets of some packages divide themselves. If the data set has a method
    `shard(rank, world_size)`, call it. Any other IterableDataset divides itself by worker info, in
    which the loader processes of all ranks look like those of one loader.
    """
    dataset = getattr(loader, "dataset", None)
    if not isinstance(loader, DataLoader) or not isinstance(dataset, IterableDataset) or rank_info.world_size == 1:
        return loader
    if any(each.__module__.partition(".")[0] in DIVIDE_THEMSELVES for each in type(dataset).__mro__):
        return loader
    hook = getattr(dataset, "shard", None)
    if callable(hook):
        hook(rank_info.world_rank, rank_info.world_size)
        return loader
    changed: dict[str, Any] = {"dataset": RankShard(dataset, rank_info.world_rank, rank_info.world_size)}
    if loader.worker_init_fn is not None:
        changed["worker_init_fn"] = RankInit(loader.worker_init_fn)
    return loader_with(loader, **changed)


class RankInit:
    """Calls the user's `worker_init_fn`, which may divide the stream, with all ranks' info."""

    def __init__(self, function: Callable[[int], None]) -> None:
        self._function = function

    def __call__(self, worker_id: int) -> None:
        own = get_worker_info()
        assert own is not None
        shard = own.dataset
        assert isinstance(shard, RankShard)
        info = shard.info(own)
        with worker_info_seen_as(info):
            self._function(info.id)


class RankShard(IterableDataset[Any]):
    """Iterates over the user's data set, whose worker info counts processes of all ranks."""

    def __init__(self, dataset: IterableDataset[Any], rank: int, world_size: int) -> None:
        self._dataset, self._rank, self._world_size = dataset, rank, world_size

    def __getattr__(self, name: str) -> Any:
        """Have a state if the data set has one."""
        if name in ("state_dict", "load_state_dict") and "_dataset" in vars(self):
            return getattr(self._dataset, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def info(self, own: Any) -> Any:
        """Return worker info as if the loader processes of all ranks belonged to one loader."""
        workers = own.num_workers if own is not None else 1
        return worker_info(
            id=self._rank * workers + (own.id if own is not None else 0),
            num_workers=self._world_size * workers,
            seed=own.seed if own is not None else 0,
            dataset=self._dataset,
        )

    def __iter__(self) -> Iterator[Any]:
        info = self.info(get_worker_info())
        stream: Iterator[Any] | None = None
        while True:
            with worker_info_seen_as(info):
                if stream is None:
                    stream = iter(self._dataset)
                try:
                    item = next(stream)
                except StopIteration:
                    return
            yield item
