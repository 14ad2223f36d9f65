"""Sources of a rank's batches. A data set's batch is the batch of all ranks together; each rank
takes its rows. Worker.

All ranks iterate over the same batches in the same order (the trainer gives TensorFlow the same
seed on all ranks, so that they shuffle alike). So the position in an epoch is one number, which is
valid for any number of ranks. With sharding by file, each rank reads its own files instead; the
ranks only agree on the end of the epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from operator import itemgetter
from typing import Any

import tensorflow as tf

from raysgd.core.decisions.sampling_plan import SamplingPlan
from raysgd.core.ranks import RankInfo
from raysgd.errors import ConfigError
from raysgd.replica.seeding import Places, seed_python_and_numpy
from raysgd.replica.steps.position import Position
from raysgd.replica.steps.step import Drawn
from raysgd.tf import foreign
from raysgd.tf.channel import Channel
from raysgd.tf.registered import rows_in


class Passes:
    """Reads a pass over data for each epoch, with one iterator over any number of calls: another
    one could have another order. `begun` is called before each pass."""

    def __init__(self, data: Any, begun: Callable[[], None]) -> None:
        self._data, self._begun = data, begun
        self._live: Iterator[Any] = iter(())
        self._passes, self._epoch, self._passed = 0, -1, 0  # it has none of an epoch yet
        self._last: Any = None

    def rest(self, epoch: int, offset: int) -> Iterator[Any]:
        """The batches after `offset`. The one that was read last may not have been committed."""
        if self._epoch != epoch or self._passed not in (offset, offset + 1):
            self._live, self._epoch, self._passed = self._pass(epoch, offset), epoch, offset
        elif self._passed == offset + 1:
            yield self._last
        while (batch := self._next()) is not None:
            self._last, self._passed = batch, self._passed + 1
            yield batch

    def _next(self) -> Any:
        try:
            return next(self._live, None)
        except BaseException:
            if not isinstance(self._data, tf.data.Dataset):
                self._epoch = -1  # an iterator of Python has ended with its error
            raise

    def _pass(self, epoch: int, offset: int) -> Iterator[Any]:
        """Make an iterator over the rest of the epoch. The order of a shuffle depends on how often
        the data set was begun, so passes of earlier epochs are begun, too: no public function
        advances the seeds of all shuffles in a data set otherwise. TensorFlow reads nothing for an
        iterator before its first batch is asked for, so this takes milliseconds for each epoch."""
        while self._passes < epoch - 1:
            self._passes += 1
            if isinstance(self._data, tf.data.Dataset):
                iter(self._data)
        self._passes += 1
        self._begun()
        if isinstance(self._data, tf.data.Dataset):
            return iter(self._data.skip(offset).prefetch(tf.data.AUTOTUNE))
        return islice(iter(self._data), offset, None)


class SharedSource:
    """Draws this rank's rows of every batch. Every row is used once per epoch, over any number of
    resizes. The epoch is read from `position`, because a new process can begin in the middle of an
    epoch. `begun` is called before each pass."""

    def __init__(self, loader: Any, position: Position, *, pad: bool, begun: Callable[[], None] = lambda: None) -> None:
        self.loader, self._position, self._pad = loader, position, pad
        self._passes = Passes(loader, begun)

    def begin(self, epoch: int, rank_info: RankInfo, shared: bool) -> None:
        """Do nothing: `batches` begins a new pass."""

    def batches(self, rank_info: RankInfo, offset: int) -> Iterator[Drawn]:
        """Read this rank's part of the rest."""
        for number, batch in enumerate(self._passes.rest(self._position.epoch, offset), offset + 1):
            if (drawn := self._part_of(batch, rank_info, number)) is not None:
                yield drawn

    def steps_left(self, rank_info: RankInfo, offset: int) -> int | None:
        return _length(self.loader, offset)

    def _part_of(self, batch: Any, rank_info: RankInfo, offset: int) -> Drawn | None:
        """This rank's rows of a batch; None if it need not take part."""
        rows, ranks = rows_in(batch), rank_info.world_size
        if ranks == 1:
            return Drawn(batch, offset, rows=rows, part=rank_info.world_rank, samples=rows)
        plan = SamplingPlan(total=rows, step_size=rows, parts=ranks, world_size=ranks, pad=self._pad)
        for part in plan.of_rank(rank_info.world_rank, 0):
            cut = tf.nest.map_structure(itemgetter(slice(part.start, part.stop)), batch)
            return Drawn(cut, offset, part.fresh, rows, part.weight, part=part.part, samples=part.stop - part.start)
        return None


class OwnSource:
    """Draws from data that only this rank has. An epoch lasts until all ranks have used up their
    data; a rank that has none left repeats its last batch, with weight 0."""

    def __init__(
        self,
        loader: Any,
        data: Any,
        position: Position,
        channel: Channel,
        *,
        together: bool,
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        self.loader, self.data, self._position = loader, data, position
        self._channel, self._together = channel, together
        self._passes = Passes(data, begun)

    def begin(self, epoch: int, rank_info: RankInfo, shared: bool) -> None:
        """Do nothing: `batches` begins a new pass."""

    def batches(self, rank_info: RankInfo, offset: int) -> Iterator[Drawn]:
        rest, last = self._passes.rest(self._position.epoch, offset), None
        while True:
            batch = next(rest, None)
            mine = 0 if batch is None else rows_in(batch)
            total = int(self._channel.sum([tf.constant(mine)])[0]) if self._together else mine
            if total == 0:
                return
            last = batch if batch is not None else last if last is not None else _blank(self.data)
            offset += 1
            yield Drawn(last, offset, mine > 0, total, mine * rank_info.world_size / total, part=rank_info.world_rank)

    def steps_left(self, rank_info: RankInfo, offset: int) -> int | None:
        return None if self._channel.size > 1 else _length(self.data, offset)


def make_source(
    data: Any,
    position: Position,
    rank_info: RankInfo,
    channel: Channel,
    *,
    training: bool,
    places: Places | None = None,
) -> SharedSource | OwnSource:
    """Make the source for a data set, by its own
    `options.experimental_distribute.auto_shard_policy`. With `places`, Python's and NumPy's
    generators are seeded for each pass, alike on all ranks."""

    def begun() -> None:
        if places is not None:
            seed_python_and_numpy(places.number(epoch=position.epoch))

    policies, policy = tf.data.experimental.AutoShardPolicy, _policy_of(data)
    if policy in (policies.AUTO, policies.DATA):
        return SharedSource(data, position, pad=training, begun=begun)
    if policy not in (policies.FILE, policies.OFF):
        raise ConfigError(
            f"the data set's auto_shard_policy is {policies(policy).name}: it must be AUTO, DATA, FILE or OFF"
        )
    shard = _own_files(data, rank_info) if policy == policies.FILE else data
    return OwnSource(data, shard, position, channel, together=training and rank_info.world_size > 1, begun=begun)


def batches_per_epoch(data: Any, workers: int) -> int | None:
    """How many steps an epoch has for each of these workers, None if not known."""
    policies = tf.data.experimental.AutoShardPolicy
    if workers > 1 and _policy_of(data) not in (policies.AUTO, policies.DATA):
        return None
    return _length(data, 0)


def _policy_of(data: Any) -> Any:
    if isinstance(data, tf.data.Dataset):
        return data.options().experimental_distribute.auto_shard_policy
    return tf.data.experimental.AutoShardPolicy.AUTO


def _own_files(data: Any, rank_info: RankInfo) -> Any:
    """Read the data of this rank's files, in batches of this rank's part of the batch."""
    if rank_info.world_size == 1:
        return data
    size = foreign.batch_size(data)
    if size < rank_info.world_size:
        raise ConfigError(
            f"to shard a data set by file, its batch size must be known and at least the number of workers "
            f"({rank_info.world_size}), but it is {size if size > 0 else 'unknown'}: call .batch(n) on it, and after that "
            "only methods that keep the number of rows"
        )
    shard = foreign.shard_by_file(data, rank_info.world_size, rank_info.world_rank)
    each, rest = divmod(size, rank_info.world_size)
    return shard.rebatch(each + (rank_info.world_rank < rest))


def _length(data: Any, offset: int) -> int | None:
    if isinstance(data, tf.data.Dataset):
        total = int(data.cardinality())
    else:
        total = len(data) if hasattr(data, "__len__") else -1
    return None if total < 0 else max(total - offset, 0)


def _blank(data: Iterable[Any]) -> Any:
    """Make a batch of one row for a rank without data, which must take part in sums."""
    spec = getattr(data, "element_spec", None)
    if spec is None:
        raise ConfigError("a worker has no batch: give every worker data, or use a tf.data.Dataset")
    return tf.nest.map_structure(lambda leaf: tf.zeros([1, *leaf.shape[1:]], leaf.dtype), spec)
