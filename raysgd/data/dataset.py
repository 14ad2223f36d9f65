"""RaySGD's Dataset: an endless stream of samples, which threads download. Both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from copy import copy
from dataclasses import dataclass
from itertools import islice, tee
from typing import Any

from raysgd.config import at_least

Pair = tuple[Any, Any]

# The limit for "unlimited" downloads at a time: more would only cost threads.
_MAX_THREADS = 128


class Dataset:
    """A stream of samples, of which every worker reads its own shard.

        dataset = Dataset(urls, batch_size=64, download_func=fetch, transform=augment)
        for epoch in range(10):
            trainer.train(dataset=dataset, num_steps=100)

    For each item of `data`, in order and endlessly:
        pair = transform(download_func(item))      each function only if given; the result must be a pair (x, y)
        the next shard in turn adds the pair to its batch

    `batch_size` is that of each worker, and `download_func` and `transform` are functions of one
    value. `data` is a list, another iterable, or a function that returns one. It is repeated
    endlessly, so pass `num_steps` when you train on it. Only empty `data` ends. The items of a
    generator are kept in memory, to be repeated. Pass the generator function instead to run it
    again for each pass.

    `max_concurrency` is the number of downloads at a time: 1 downloads one after another, in order;
    0 means no limit. With any other number than 1, the samples of a batch come in any order, but
    the samples in each batch are always the same.

    It has no position: a shard can be read again from any sample. It can be pickled if `data` and
    the two functions can.
    """

    def __init__(
        self,
        data: Iterable[Any] | Callable[[], Iterable[Any]],
        batch_size: int = 32,
        download_func: Callable[[Any], Pair] | None = None,
        max_concurrency: int = 0,
        transform: Callable[[Any], Pair] | None = None,
    ) -> None:
        _check_callable("download_func", download_func)
        _check_callable("transform", transform)
        if max_concurrency < 0:
            raise ValueError(f"max_concurrency must be 0 (unlimited) or more, got {max_concurrency!r}")
        if not isinstance(data, Iterable) and not callable(data) and not hasattr(data, "__getitem__"):
            raise TypeError(
                f"data must be an iterable, or a function that returns one, got {data!r:.200}: pass a list, or a function that "
                "yields the items"
            )
        # An iterator can be read only once: each pass reads a copy of this one, and all copies share the items.
        self._data: Any = tee(data, 1)[0] if isinstance(data, Iterator) else data
        at_least("batch_size", batch_size, 1, whole=True)
        self.batch_size = batch_size
        self.download_func = download_func
        self.max_concurrency = max_concurrency
        self.transform = transform
        self.num_shards = 1

    def set_num_shards(self, num_shards: int) -> None:
        """Set the number of shards for later calls of `get_shard`."""
        at_least("num_shards", num_shards, 1, whole=True)
        self.num_shards = num_shards

    def get_shard(self, i: int, *, start: int = 0) -> Shard:
        """Return shard `i` of the stream, an iterable of batches.

        `start` is how many samples of the whole stream, over all shards, have been used already.
        The samples after them are divided among the current number of shards, whatever that number
        was before.
        """
        if not 0 <= i < self.num_shards:
            raise AssertionError(
                f"i must be a shard's number, from 0 to {self.num_shards - 1}, got {i}. Call set_num_shards() first to have more shards"
            )
        return Shard(self, index=i, num_shards=self.num_shards, start=start)

    def items(self) -> Iterator[Any]:
        """Yield the items of `data`, pass after pass, until a pass has none."""
        found = True
        while found:
            found = False
            for item in self._one_pass():
                found = True
                yield item

    def _one_pass(self) -> Iterable[Any]:
        data = self._data
        if isinstance(data, Iterable):
            return copy(data) if isinstance(data, Iterator) else data
        if callable(data):
            return data()  # type: ignore[no-any-return]
        return map(data.__getitem__, range(len(data)))  # samples by index, as in torch's datasets

    def __getstate__(self) -> dict[str, Any]:
        if isinstance(self._data, Iterator):
            raise TypeError(
                "a Dataset whose data is an iterator cannot be sent to another process: pass a list, or the function that creates "
                "the iterator"
            )
        return vars(self)

    def prepare(self, item: Any) -> Pair:
        """Return the pair (x, y) for an item. Several threads may call this."""
        pair = item if self.download_func is None else self.download_func(item)
        if self.transform is not None:
            pair = self.transform(pair)
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(
                f"a sample must be a pair (x, y), got {pair!r:.200} for the item {item!r:.200}: return a pair from download_func or "
                "transform"
            )
        return pair[0], pair[1]


@dataclass(frozen=True)
class Shard:
    """One worker's part of a Dataset: yields lists of `batch_size` pairs (x, y).

    Of n shards, shard i has the samples start + i, start + i + n, ... of the stream. Each iteration
    begins with the first.
    """

    dataset: Dataset
    index: int
    num_shards: int
    start: int = 0

    def __iter__(self) -> Iterator[list[Pair]]:
        dataset = self.dataset
        items = islice(dataset.items(), self.start + self.index, None, self.num_shards)
        if dataset.download_func is None or dataset.max_concurrency == 1:
            return _batches_in_turn(items, dataset)
        return _batches_by_threads(items, dataset)


def _batches_in_turn(items: Iterator[Any], dataset: Dataset) -> Iterator[list[Pair]]:
    while batch := [dataset.prepare(item) for item in islice(items, dataset.batch_size)]:
        yield batch


def _batches_by_threads(items: Iterator[Any], dataset: Dataset) -> Iterator[list[Pair]]:
    size = dataset.batch_size
    pool = ThreadPoolExecutor(dataset.max_concurrency or min(2 * size, _MAX_THREADS), "raysgd-download")

    def begin() -> list[Future[Pair]]:
        return [pool.submit(dataset.prepare, item) for item in islice(items, size)]

    try:
        batch = begin()
        while batch:
            following = begin()  # these downloads run while the caller uses this batch
            yield [future.result() for future in as_completed(batch)]
            batch = following
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _check_callable(name: str, value: Any) -> None:
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be a function or None, got {value!r:.200}")
