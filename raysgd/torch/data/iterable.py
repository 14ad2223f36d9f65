"""Divide an IterableDataset among ranks, by worker info or its own `shard` method. Worker."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any
from weakref import WeakValueDictionary

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from raysgd.core.ranks import RankInfo
from raysgd.torch.foreign import loader_with, ranks_asked, worker_info, worker_info_seen_as

# Their data sets divide themselves among ranks, so that they must see the worker info of their own rank.
DIVIDE_THEMSELVES = {"litdata", "streaming", "webdataset"}
DIVIDED_TWICE = (
    "the data set %s divides itself by worker info, in which raysgd counts the loader processes of all ranks, and also asks "
    "torch.distributed for the rank. If it multiplies both, rows are left out. Use info.id of info.num_workers alone, or give it a method "
    "shard(rank, world_size), which raysgd calls instead"
)

logger = logging.getLogger("raysgd")
_divided = WeakValueDictionary[int, Any]()  # data sets whose `shard` was called, by id, because some cannot be hashed


def sharded_live(loader: Iterable[Any], rank_info: RankInfo, *, warns: bool = False) -> Iterable[Any]:
    """A loader of this rank's part of the stream.

    Data sets of some packages divide themselves. If the data set has a method
    `shard(rank, world_size)`, call it; for a single rank, only to undo an earlier call. Any other
    IterableDataset divides itself by worker info, in which the loader processes of all ranks look
    like those of one loader. It `warns` of one that also asks for its rank.
    """
    dataset = getattr(loader, "dataset", None)
    complete = rank_info.world_size == 1 and id(dataset) not in _divided
    if not isinstance(loader, DataLoader) or not isinstance(dataset, IterableDataset) or complete:
        return loader
    if any(each.__module__.partition(".")[0] in DIVIDE_THEMSELVES for each in type(dataset).__mro__):
        return loader
    hook = getattr(dataset, "shard", None)
    if callable(hook):
        _divided[id(dataset)] = dataset
        hook(rank_info.world_rank, rank_info.world_size)
        return loader
    shard = RankShard(dataset, rank_info.world_rank, rank_info.world_size, warns=warns)
    changed: dict[str, Any] = {"dataset": shard}
    if loader.worker_init_fn is not None:
        changed["worker_init_fn"] = RankInit(loader.worker_init_fn)
    return loader_with(loader, **changed)


class RankInit:
    """Calls the user's `worker_init_fn`, which may divide the stream, with all ranks' info."""

    def __init__(self, function: Callable[[int], None]) -> None:
        self._function = function

    def __call__(self, worker_id: int) -> None:
        worker = get_worker_info()
        assert worker is not None
        shard = worker.dataset
        assert isinstance(shard, RankShard)
        info = shard.info(worker)
        with worker_info_seen_as(info):
            self._function(info.id)


class RankShard(IterableDataset[Any]):
    """Iterates over the user's data set, whose worker info counts processes of all ranks."""

    def __init__(self, dataset: IterableDataset[Any], rank: int, world_size: int, *, warns: bool) -> None:
        self._dataset, self._rank, self._world_size, self._warns = dataset, rank, world_size, warns

    def __getattr__(self, name: str) -> Any:
        """Have a state if the data set has one."""
        if name in ("state_dict", "load_state_dict") and "_dataset" in vars(self):
            return getattr(self._dataset, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def info(self, worker: Any) -> Any:
        """Make worker info as if the loader processes of all ranks belonged to one loader."""
        workers = worker.num_workers if worker is not None else 1
        return worker_info(
            id=self._rank * workers + (worker.id if worker is not None else 0),
            num_workers=self._world_size * workers,
            seed=worker.seed if worker is not None else 0,
            dataset=self._dataset,
        )

    def __iter__(self) -> Iterator[Any]:
        seen = self.info(get_worker_info())
        info, warns = ReadInfo(seen), self._warns and seen.id == 0
        stream: Iterator[Any] | None = None
        while True:
            with worker_info_seen_as(info), ranks_asked() if warns else nullcontext(()) as asked:
                if stream is None:
                    stream = iter(self._dataset)
                try:
                    item = next(stream)
                except StopIteration:
                    return
            if warns and asked and info.read:
                warns = False
                logger.warning(DIVIDED_TWICE, type(self._dataset).__name__)
            yield item


class ReadInfo:
    """Worker info that notes whether it was read."""

    def __init__(self, info: Any) -> None:
        self._info, self.read = info, False

    def __getattr__(self, name: str) -> Any:
        self.read = True
        return getattr(self._info, name)
