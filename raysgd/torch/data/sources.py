"""Sources of one rank's batches. After a change of the group, the rest of an epoch is divided among the new ranks. Worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from raysgd.core.outcomes import DataLoaderFailure
from raysgd.core.ranks import RankInfo
from raysgd.core.sampling_plan import SamplingPlan
from raysgd.errors import ConfigError
from raysgd.ray_data.columns import RayData
from raysgd.torch.data.iterable import sharded_live
from raysgd.torch.data.loading import LoaderIterator
from raysgd.torch.data.sampling import (
    Order,
    Picker,
    agree,
    epoch_order,
    evened,
    following,
    has_own_batches,
    plan_of,
    random_sources,
    set_epoch,
)
from raysgd.torch.foreign import end_processes, live_iterator
from raysgd.training.feed import Drawn
from raysgd.training.position import Position

__all__ = ["BatchSource", "LiveSource", "PlannedSource", "RowSource", "StreamSource", "close"]


class BatchSource:
    """What all sources have in common. By default the length of an epoch is not known, nothing happens when an epoch begins,
    and the position is the only state."""

    loader: Any
    counts_samples = False

    def begin(self, epoch: int, rank_info: RankInfo, shared: bool) -> None:
        """Prepare a new epoch."""

    def batches(self, rank_info: RankInfo, offset: int) -> Iterator[Drawn]:
        """Return this rank's part of the rest of the epoch."""
        raise NotImplementedError

    def steps_left(self, rank_info: RankInfo, offset: int) -> int | None:
        """Return how many more batches the epoch has for every rank, or None if that is not known."""
        return None

    def state(self) -> dict[str, Any]:
        """Return what another process needs, in addition to the position, to continue this epoch."""
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Take the state of a source in another process."""


class PlannedSource(BatchSource):
    """A map-style loader. Every sample is used once per epoch, over any number of resizes.

    Owns the epoch's order. The caller owns the offset, because only committed batches count.
    """

    def __init__(self, loader: DataLoader[Any], *, pad: bool, global_batch: int | None = None) -> None:
        self.loader, self._pad = loader, pad
        self._global_batch = global_batch
        self._own_batches = own = has_own_batches(loader)
        if global_batch is not None and not own and loader.batch_size is None:
            raise ConfigError(
                "ElasticConfig(batch='global') cannot divide the batches of a DataLoader with batch_size=None, which are the "
                "items of its data set: pass batch_size=n to the DataLoader, or use batch='per_worker'"
            )
        self._picker = Picker(own_batches=own, batched=own or loader.batch_size is not None)
        self._twin = following(loader, self._picker)
        self.counts_samples = not own
        self._seed = torch.initial_seed()
        self.order: Order = range(0)
        self._open: tuple[RankInfo, int, Iterator[Drawn]] | None = None

    def begin(self, epoch: int, rank_info: RankInfo, shared: bool) -> None:
        """Take the new epoch's order from rank 0's sampler. Every rank still draws an order from its own sampler, so that
        their random states stay equal and any of them can become rank 0."""
        set_epoch(self.loader, epoch)
        order = epoch_order(self.loader)
        if shared and rank_info.world_size > 1 and not isinstance(order, range):
            order = agree(order if rank_info.world_rank == 0 else None)
        self.order = order

    def state(self) -> dict[str, Any]:
        """Return the order of this epoch, and the generators' states for the next ones."""
        order = None if isinstance(self.order, range) else self.order
        return {"order": order, "generators": [source.get_state() for source in random_sources(self.loader)]}

    def load(self, state: dict[str, Any]) -> None:
        order = state.get("order")
        self.order = range(len(self.loader.sampler)) if order is None else order
        self._open = None
        for source, saved in zip(random_sources(self.loader), state.get("generators", ()), strict=False):
            source.set_state(saved)

    def batches(self, rank_info: RankInfo, offset: int) -> Iterator[Drawn]:
        """Return this rank's part of the rest of the epoch: the last call's iterator, if that stopped at `offset`."""
        if self._open is not None and self._open[:2] == (rank_info, offset):
            return self._open[2]
        fresh = self._generate(rank_info, offset)
        self._open = (rank_info, offset, fresh)
        return fresh

    def _generate(self, rank_info: RankInfo, offset: int) -> Iterator[Drawn]:
        if self._pad and self._own_batches and self._global_batch is None:
            self.order = evened(self.order, rank_info.world_size, offset)
        if self._seed != torch.initial_seed():
            self._seed = torch.initial_seed()
            self._twin.generator.manual_seed(self._seed)  # the processes of the loader get their seeds from it
        self._picker.follow(self.order, self._plan(rank_info), rank_info.world_rank, offset)
        try:
            for (after, part), batch in zip(self._picker.steps(), LoaderIterator(self._twin), strict=True):
                assert self._open is not None
                self._open = (rank_info, after, self._open[2])
                yield Drawn(batch, after, part.fresh)
        except (Exception, DataLoaderFailure):
            self._open = None  # a generator that raised has no more batches, but the epoch has
            raise
        self._open = None

    def steps_left(self, rank_info: RankInfo, offset: int) -> int:
        return self._plan(rank_info).steps_left(offset)

    def _plan(self, rank_info: RankInfo) -> SamplingPlan:
        ranks = rank_info.world_size
        return plan_of(self.loader, len(self.order), ranks, pad=self._pad, step=self._global_batch)


class LiveSource(BatchSource):
    """Anything that is iterated: an IterableDataset's loader, a list of batches, a generator, a user's own sharding.

    Its live iterator has the position, which another process cannot take over. With `together`, the epoch ends on all ranks
    when one of them has no more batches. After a `DataLoaderFailure`, the stream begins again from the same random states,
    and the batches that it has returned before are skipped.
    """

    resumable = False

    def __init__(self, loader: Iterable[Any], *, shard: bool, together: bool, keep: int = 1) -> None:
        self.loader, self._shard, self._together = loader, shard, together
        self._live: Iterator[Any] | None = None
        self._kept: deque[Drawn] = deque(maxlen=keep)
        self._votes: Any = None
        self._given = 0
        self._randomness: list[torch.Tensor] = []

    def begin(self, epoch: int, rank_info: RankInfo, shared: bool) -> None:
        set_epoch(self.loader, epoch)
        self._live = None
        self._given = 0
        self._kept.clear()

    def batches(self, rank_info: RankInfo, offset: int) -> Iterator[Drawn]:
        """Yield first what was drawn before a worker failed, but was not committed."""
        if self._live is None:
            self._live = self._opened(rank_info)
        vote = self._vote if self._together and rank_info.world_size > 1 else bool
        again = [drawn for drawn in self._kept if drawn.offset > offset]
        while True:
            offset += 1
            if again:
                drawn = again.pop(0)
            else:
                drawn = Drawn(self._next(), offset)
                self._kept.append(drawn)  # before the vote, which fails if a peer has failed
            if not vote(drawn.batch is not _END):
                self._live = None
                self._kept.clear()
                return
            yield drawn

    def _opened(self, rank_info: RankInfo) -> Iterator[Any]:
        """Return a new iterator. If the epoch has begun already, it continues after the batches that were returned."""
        sources = [torch.default_generator]
        if isinstance(self.loader, DataLoader):
            sources += random_sources(self.loader)
        now = [source.get_state() for source in sources]
        if self._given:
            for source, begun in zip(sources, self._randomness, strict=True):
                source.set_state(begun)
        else:
            self._randomness = now
        live = LoaderIterator(sharded_live(self.loader, rank_info) if self._shard else self.loader)
        if self._given:
            deque(islice(live, self._given), maxlen=0)
            for source, state in zip(sources, now, strict=True):
                source.set_state(state)
        return live

    def _next(self) -> Any:
        assert self._live is not None
        try:
            batch = next(self._live, _END)
        except DataLoaderFailure:
            self._live = None
            raise
        self._given += 1
        return batch

    def _vote(self, mine: bool) -> bool:
        """Return whether all ranks have another batch. The vote uses gloo, so that a GPU never waits for the answer."""
        if self._votes is None or self._votes[0] is not dist.group.WORLD:
            group = dist.new_group(backend="gloo") if dist.get_backend() != "gloo" else None
            self._votes = (dist.group.WORLD, group)
        answer = torch.tensor([int(mine)])
        dist.all_reduce(answer, op=dist.ReduceOp.MIN, group=self._votes[1])
        return bool(answer.item())


class StreamSource(BatchSource):
    """A `raysgd.data.Dataset` that was passed to one call. Its stream is divided by position, so it survives resizes, too.
    It has no epochs."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = self.loader = dataset

    def batches(self, rank_info: RankInfo, offset: int) -> Iterator[Drawn]:
        self._dataset.set_num_shards(rank_info.world_size)
        step = self._dataset.batch_size * rank_info.world_size
        for pairs in self._dataset.get_shard(rank_info.world_rank, start=offset):
            offset += step
            yield Drawn(tuple(_joined(column) for column in zip(*pairs, strict=True)), offset)


def _joined(items: tuple[Any, ...]) -> Any:
    """Concatenate rows of shape (1, ...), as RaySGD did. Collate anything else as a DataLoader does."""
    if all(isinstance(item, torch.Tensor) and item.dim() > 0 and item.shape[0] == 1 for item in items):
        return torch.cat(items)
    return torch.utils.data.default_collate(list(items))


class RowSource(BatchSource):
    """A Ray Dataset. Its rows are divided by their position in its stream, which is read once for all ranks.

    Owns the number of the current pass, by which all ranks identify it. The position in the pass is in `position`. `rows`
    reads the rows, `own_call` is whether the data set is for one call only, `step` is the number of rows of all ranks in a
    step (None: `batch_size` on each rank), and `keep` is how many batches can be uncommitted.
    """

    counts_samples = True

    def __init__(
        self,
        loader: Any,
        rows: Any,
        data: RayData,
        position: Position,
        *,
        own_call: bool,
        pad: bool,
        step: int | None,
        keep: int,
    ) -> None:
        self.loader, self._rows, self._data, self._position = loader, rows, data, position
        self._pad, self._step, self._keep = pad, step, keep
        self._number = (position.call if own_call else -1, position.epoch)

    def begin(self, epoch: int, rank_info: RankInfo, shared: bool) -> None:
        self._number = (self._number[0], epoch + 1)

    def state(self) -> dict[str, Any]:
        return {"number": self._number}

    def load(self, state: dict[str, Any]) -> None:
        self._number = tuple(state.get("number", self._number))

    def batches(self, rank_info: RankInfo, offset: int) -> Iterator[Drawn]:
        step = self._step or (self._data.batch_size or 1) * rank_info.world_size
        step = max(step, rank_info.world_size)
        place: dict[str, Any] = {"call": self._position.call, "number": self._number, "start": offset}
        for columns, after, fresh in self._rows.read(rank_info, **place, step=step, pad=self._pad, keep=self._keep):
            yield Drawn(_tensors(self._data.arranged(columns)), after, fresh)


def _tensors(batch: Any) -> Any:
    """Return the columns as tensors; floating-point ones have torch's default type, as models have."""
    if isinstance(batch, dict):
        return {name: _tensors(column) for name, column in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_tensors(column) for column in batch)
    tensor = torch.as_tensor(batch)
    return tensor.to(torch.get_default_dtype()) if tensor.is_floating_point() else tensor


_END = object()


def close(source: BatchSource | None) -> None:
    """End loader processes that persist from one epoch to the next."""
    end_processes(live_iterator(getattr(source, "_twin", None)))
