"""Where a rank's batches come from. A data set's batch is that of all ranks together; each takes its rows of it.

Every rank runs through the same batches in the same order (the trainer seeds TensorFlow alike on all of them, so a
`shuffle` agrees), which makes the position in an epoch one number that holds for any number of ranks. Sharding by
file gives every rank files of its own instead: less to read, and nothing to agree on but when the epoch ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import tensorflow as tf

from raysgd.core.ranks import RankInfo
from raysgd.errors import ConfigError
from raysgd.tf.channel import Channel

__all__ = ["Drawn", "OwnSource", "SharedSource", "Source", "make_source"]


@dataclass(frozen=True)
class Drawn:
    """One rank's batch; where the epoch stands once it is committed; the rows of all ranks' batches together, and this
    one's part of them; and whether its rows are new (or repeated, by a rank that has none but must take part)."""

    batch: Any
    offset: int
    rows: int
    share: float = 1.0
    fresh: bool = True


class SharedSource:
    """All ranks see all batches, and each takes its rows. Every row once per epoch, over any number of resizes."""

    def __init__(self, data: Any, *, pad: bool) -> None:
        self.data = data
        self._pad = pad
        self._passes = self._epoch = self._passed = 0
        self._live: Iterator[Any] | None = None
        self._last: Drawn | None = None

    def batches(self, rank_info: RankInfo, epoch: int, offset: int) -> Iterator[Drawn]:
        """This rank's part of the rest of the epoch; where it can, from the iterator that stands there."""
        last, self._last = self._last, None
        goes_on = self._live is not None and self._epoch == epoch
        if goes_on and last is not None and self._passed == last.offset == offset + 1:
            self._last = last
            yield last  # it was drawn before, and never committed: its turn again
        elif not goes_on or self._passed != offset:
            self._live, self._epoch, self._passed = self._pass(epoch, offset), epoch, offset
        while self._live is not None:
            batch = next(self._live, None)
            if batch is None:
                self._live = None
                return
            self._passed += 1
            self._last = self._dealt(batch, rank_info, self._passed)
            if self._last is not None:
                yield self._last

    def steps_left(self, offset: int) -> int | None:
        return _length(self.data, offset)

    def _pass(self, epoch: int, offset: int) -> Iterator[Any]:
        """The epoch's own pass: a shuffle's order is that of how often the data set was begun."""
        while self._passes < epoch - 1:
            self._passes += 1
            if isinstance(self.data, tf.data.Dataset):
                iter(self.data)
        self._passes += 1
        if isinstance(self.data, tf.data.Dataset):
            return iter(self.data.skip(offset).prefetch(tf.data.AUTOTUNE))
        return islice(iter(self.data), offset, None)

    def _dealt(self, batch: Any, rank_info: RankInfo, offset: int) -> Drawn | None:
        rows = _rows(batch)
        if rank_info.world_size == 1:
            return Drawn(batch, offset, rows)
        base, extra = divmod(rows, rank_info.world_size)
        rank = rank_info.world_rank
        start, size = rank * base + min(rank, extra), base + (rank < extra)
        if size:
            return Drawn(_cut(batch, start, start + size), offset, rows, share=size / rows)
        if not self._pad:
            return None
        again = rank % rows
        return Drawn(_cut(batch, again, again + 1), offset, rows, share=0.0, fresh=False)


class OwnSource:
    """Each rank has data of its own. An epoch lasts until all have used theirs up; who is done sooner repeats its
    last batch, with no weight."""

    def __init__(self, data: Any, channel: Channel, *, together: bool) -> None:
        self.data = data
        self._channel, self._together = channel, together

    def batches(self, rank_info: RankInfo, epoch: int, offset: int) -> Iterator[Drawn]:
        live = islice(iter(self.data), offset, None)
        last: Any = None
        while True:
            batch = next(live, None)
            mine = 0 if batch is None else _rows(batch)
            total = int(self._channel.sum([tf.constant(mine)])[0]) if self._together else mine
            if total == 0:
                return
            last = batch if batch is not None else last if last is not None else _blank(self.data)
            offset += 1
            yield Drawn(last, offset, total, share=mine / total, fresh=mine > 0)

    def steps_left(self, offset: int) -> int | None:
        return None if self._channel.size > 1 else _length(self.data, offset)


Source = SharedSource | OwnSource


def make_source(data: Any, rank_info: RankInfo, channel: Channel, *, training: bool) -> Source:
    """By the data set's own option: `options.experimental_distribute.auto_shard_policy`."""
    policies = tf.data.experimental.AutoShardPolicy
    policy = policies.AUTO
    if isinstance(data, tf.data.Dataset):
        policy = data.options().experimental_distribute.auto_shard_policy
    if policy in (policies.AUTO, policies.DATA):
        return SharedSource(data, pad=training)
    if policy == policies.FILE:
        return OwnSource(_own_files(data, rank_info), channel, together=training and rank_info.world_size > 1)
    if policy == policies.OFF:
        return OwnSource(data, channel, together=training and rank_info.world_size > 1)
    raise ConfigError(f"the data set asks for {policies(policy).name}; AUTO, DATA, FILE and OFF are possible here")


def _own_files(data: Any, rank_info: RankInfo) -> Any:
    """This rank's files, in batches of its part of the whole batch."""
    if rank_info.world_size == 1:
        return data
    from tensorflow.python.data.experimental.ops import distribute

    size = int(distribute.compute_batch_size(data))
    if size < rank_info.world_size:
        raise ConfigError(
            "to share a data set by file its batch size must be known and at least the number of workers "
            f"({rank_info.world_size}): end it with .batch(n) and what follows that keeps the rows apart"
        )
    own = distribute._AutoShardDataset(data, num_workers=rank_info.world_size, index=rank_info.world_rank)
    return own.rebatch(size // rank_info.world_size)


def _rows(batch: Any) -> int:
    return int(tf.nest.flatten(batch)[0].shape[0])


def _cut(batch: Any, start: int, stop: int) -> Any:
    return tf.nest.map_structure(lambda leaf: leaf[start:stop], batch)


def _length(data: Any, offset: int) -> int | None:
    if isinstance(data, tf.data.Dataset):
        total = int(data.cardinality())
    else:
        total = len(data) if hasattr(data, "__len__") else -1
    return None if total < 0 else max(total - offset, 0)


def _blank(data: Iterable[Any]) -> Any:
    """A batch of one row for a rank that has no data at all, and must take part in the sums."""
    spec = getattr(data, "element_spec", None)
    if spec is None:
        raise ConfigError("a worker has no batch at all: give every worker data, or a tf.data.Dataset")
    return tf.nest.map_structure(lambda leaf: tf.zeros([1, *leaf.shape[1:]], leaf.dtype), spec)
