"""An endless stream of samples, fetched by threads and dealt to the workers. Standard library only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from itertools import islice
from typing import Any, NoReturn

Pair = tuple[Any, Any]

# What "unlimited" can mean: more downloads at a time than this only cost threads.
_MAX_THREADS = 128


class Dataset:
    """A source of samples that every worker reads its own share of.

        dataset = Dataset(urls, batch_size=64, download_func=fetch, transform=augment)
        for epoch in range(10):
            trainer.train(dataset=dataset, num_steps=100)

    For each item of `data`, in turn and for ever:
        pair = transform(download_func(item))      each of the two only if given; (x, y) must come out
        the shard whose turn it is adds the pair to its batch

    `data` is a list, any other iterable, or a function that gives one. It repeats for ever, so say
    `num_steps` where you train on it; only an empty `data` ends. A generator runs once and its items are
    kept in memory to be repeated: pass the generator function itself to have it run anew for each pass.

    `max_concurrency` is how many downloads run at a time: 1 is one after the other and in order, 0 as many as
    are of use. Except with 1, the samples of a batch come in any order; which samples make up a batch is
    always the same.

    It owns no position: a shard can be read again from any sample. It is picklable when `data` and the two
    functions are.
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
            raise ValueError(f"max_concurrency must be 0 (unlimited) or more, not {max_concurrency!r}")
        self._data = _repeatable(data)
        self.batch_size = _at_least_one("batch_size", batch_size)
        self.download_func = download_func
        self.max_concurrency = max_concurrency
        self.transform = transform
        self._num_shards = 1

    @property
    def num_shards(self) -> int:
        return self._num_shards

    def set_num_shards(self, num_shards: int) -> None:
        """Deal the stream to so many shards from now on; shards that were handed out stay as they are."""
        self._num_shards = _at_least_one("num_shards", num_shards)

    def get_shard(self, i: int, *, start: int = 0) -> Shard:
        """Share `i` of the stream, as an iterable of batches.

        `start` is how many samples of the whole stream, over all shards, were used before: the rest of it is
        dealt anew, whatever the number of shards was then.
        """
        if not 0 <= i < self._num_shards:
            raise AssertionError(
                f"there is no shard {i}: there are {self._num_shards}, counted from 0. "
                "Call set_num_shards first to have more."
            )
        return Shard(self, index=i, num_shards=self._num_shards, start=start)

    def items(self) -> Iterator[Any]:
        """The raw items, pass after pass; it ends only after a pass that had none."""
        found = True
        while found:
            found = False
            for item in _one_pass(self._data):
                found = True
                yield item

    def prepare(self, item: Any) -> Pair:
        """The (x, y) that an item stands for. Called by several threads, if `max_concurrency` is not 1."""
        pair = item if self.download_func is None else self.download_func(item)
        if self.transform is not None:
            pair = self.transform(pair)
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(
                f"a sample must be a pair (x, y), but {item!r:.200} became {pair!r:.200}. "
                "Let download_func or transform return a pair."
            )
        return pair[0], pair[1]


class Shard:
    """One worker's share of a Dataset: iterating gives lists of `batch_size` pairs (x, y).

    With n shards, shard i has the samples start + i, start + i + n, ... of the stream, anew each time.
    """

    def __init__(self, dataset: Dataset, *, index: int, num_shards: int, start: int = 0) -> None:
        self.dataset = dataset
        self.index = index
        self.num_shards = num_shards
        self.start = start

    def __iter__(self) -> Iterator[list[Pair]]:
        dataset = self.dataset
        items = islice(dataset.items(), self.start + self.index, None, self.num_shards)
        if dataset.download_func is None or dataset.max_concurrency == 1:
            return _batches_in_turn(items, dataset)
        return _batches_by_threads(items, dataset)


def _repeatable(data: Any) -> Any:
    if isinstance(data, Iterator):  # spent after one pass and shared by all shards
        return _Remembered(data)
    if not isinstance(data, Iterable) and not callable(data) and not hasattr(data, "__getitem__"):
        raise TypeError(
            f"data must be an iterable, or a function that gives one, not {type(data).__name__}. "
            "Pass a list, or a function that yields the items."
        )
    return data


def _one_pass(data: Any) -> Iterable[Any]:
    if isinstance(data, Iterable):
        return data
    if callable(data):
        return data()  # type: ignore[no-any-return]
    return map(data.__getitem__, range(len(data)))  # indexed samples, as torch's own datasets have them


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
            following = begin()  # it downloads while the caller works on this batch
            yield [future.result() for future in as_completed(batch)]
            batch = following
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


class _Remembered:
    """An iterable over a one-shot iterator, which any number of readers can go through, also at a time."""

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._seen: list[Any] = []
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Any]:
        position = 0
        while True:
            with self._lock:
                if position == len(self._seen):
                    try:
                        self._seen.append(next(self._source))
                    except StopIteration:
                        return
                item = self._seen[position]
            yield item
            position += 1

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a Dataset over {type(self._source).__name__} cannot be sent to another process. "
            "Pass a list, or the function that makes the iterator, as data."
        )


def _check_callable(name: str, value: Any) -> None:
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be a function or None, not {type(value).__name__} ({value!r:.200})")


def _at_least_one(name: str, value: int) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
    return value
