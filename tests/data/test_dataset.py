"""RaySGD's Dataset: the stream is endless, shards lose nothing, and threads change nothing."""

from __future__ import annotations

import pickle
import threading
import time
from collections import Counter
from itertools import islice

import pytest

from raysgd.data import Dataset

PAIRS = [(k, -k) for k in range(10)]


class Indexed:
    """Samples by index only: just its length says where it ends."""

    def __len__(self):
        return len(PAIRS)

    def __getitem__(self, k):
        return PAIRS[k % len(PAIRS)]


def ten_pairs():
    yield from PAIRS


def fetch(k):
    return k, -k


def augment(pair):
    return pair[0] + 100, pair[1]


def batches(dataset, count, shard=0, start=0):
    return list(islice(dataset.get_shard(shard, start=start), count))


SOURCES = {
    "list": lambda: PAIRS,
    "tuple": lambda: tuple(PAIRS),
    "dict keys": lambda: dict.fromkeys(PAIRS),
    "generator": ten_pairs,
    "iterator": lambda: iter(PAIRS),
    "map": lambda: map(fetch, range(10)),
    "function": lambda: ten_pairs,
    "indexed": Indexed,
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_any_source_is_repeated_endlessly_in_order(source):
    dataset = Dataset(source(), batch_size=4)
    assert batches(dataset, 5) == [PAIRS[:4], PAIRS[4:8], PAIRS[8:] + PAIRS[:2], PAIRS[2:6], PAIRS[6:]]
    assert batches(dataset, 1) == [PAIRS[:4]]  # each iteration begins with the first sample


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES.keys())
def test_shards_that_are_read_in_parallel_divide_the_stream(source):
    for num_shards in (1, 2, 3, 10, 11):
        dataset = Dataset(source(), batch_size=2)
        dataset.set_num_shards(num_shards)
        readers = [iter(dataset.get_shard(i)) for i in range(num_shards)]
        stream = []
        for _ in range(5):
            step = [next(reader) for reader in readers]  # every worker takes its batch of two
            stream += [pair for position in range(2) for pair in (batch[position] for batch in step)]
        assert stream == PAIRS * num_shards


@pytest.mark.parametrize("max_concurrency", [0, 1, 3])
def test_the_rest_of_the_stream_can_be_divided_among_another_number_of_shards(max_concurrency):
    dataset = Dataset(range(24), 2, fetch, max_concurrency)
    used = Counter()
    dataset.set_num_shards(3)
    for i in range(3):
        used.update(x for batch in batches(dataset, 2, shard=i) for x, _ in batch)
    dataset.set_num_shards(2)
    for i in range(2):
        used.update(x for batch in batches(dataset, 3, shard=i, start=12) for x, _ in batch)
    assert used == Counter(range(24))


@pytest.mark.parametrize("max_concurrency", [0, 1, 7, 50])
def test_threads_change_neither_batches_nor_samples(max_concurrency):
    for batch_size in (1, 3, 64):
        dataset = Dataset(range(10), batch_size, fetch, max_concurrency, augment)
        numbers = [k % 10 for k in range(3 * batch_size)]
        expected = [numbers[at : at + batch_size] for at in range(0, 3 * batch_size, batch_size)]
        found = batches(dataset, 3)
        assert [sorted(batch) for batch in found] == [sorted((k + 100, -k) for k in batch) for batch in expected]


def with_thread(k):
    return k, threading.current_thread()


def test_one_download_at_a_time_runs_in_order_in_this_thread_and_more_in_others():
    (batch,) = batches(Dataset([0, 1, 2], 3, with_thread, max_concurrency=1), 1)
    assert batch == [(k, threading.current_thread()) for k in range(3)]
    (batch,) = batches(Dataset(range(12), 3, with_thread, max_concurrency=2), 1)
    assert {k for k, _ in batch} == {0, 1, 2}
    assert all(thread is not threading.current_thread() for _, thread in batch)


@pytest.mark.parametrize(("max_concurrency", "most"), [(1, 1), (3, 3), (0, 16)])
def test_max_concurrency_is_the_number_of_downloads_at_a_time(max_concurrency, most):
    running, peak, changed = 0, 0, threading.Condition()

    def download(k):
        nonlocal running, peak
        with changed:
            running += 1
            peak = max(peak, running)
            changed.notify_all()
            changed.wait_for(lambda: peak >= most, timeout=20)  # all of them must run at once
            running -= 1
        return k, k

    batches(Dataset(range(16), 8, download, max_concurrency), 2)
    assert peak == most


def test_downloads_stop_when_the_reader_is_closed():
    begun, closed = set(), threading.Event()

    def download(k):
        begun.add(k)
        if k >= 4:  # the next batch occupies both threads until the reader is closed
            closed.wait(timeout=20)
        return k, k

    reader = iter(Dataset(range(1000), 4, download, max_concurrency=2).get_shard(0))
    next(reader)
    reader.close()
    closed.set()
    deadline = time.monotonic() + 20
    while any(thread.name.startswith("raysgd-download") for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "a download thread outlives its reader"
        time.sleep(0.01)
    assert begun <= set(range(6))


@pytest.mark.parametrize("max_concurrency", [0, 1, 2])
def test_an_error_in_a_download_is_raised_in_the_reader(max_concurrency):
    with pytest.raises(ZeroDivisionError):
        batches(Dataset([1, 0], 2, lambda k: (k, 1 / k), max_concurrency), 1)


def test_an_empty_source_ends():
    for source in ([], (), iter([]), lambda: []):
        assert batches(Dataset(source), 3) == []
        assert batches(Dataset(source, download_func=fetch), 3) == []


def test_a_source_that_ends_yields_an_incomplete_last_batch():
    passes = iter([PAIRS[:3], PAIRS[3:5], []])
    assert batches(Dataset(lambda: next(passes), batch_size=4), 9) == [PAIRS[:4], PAIRS[4:5]]


def test_a_sample_that_is_not_a_pair_is_refused():
    for item in (3, "xy", (1,), (1, 2, 3), None):
        with pytest.raises(TypeError, match=r"must be a pair \(x, y\)"):
            batches(Dataset([item]), 1)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"data": 5}, TypeError, "got 5"),
        ({"data": None}, TypeError, "got None"),
        ({"batch_size": 0}, ValueError, "batch_size must be .* got 0"),
        ({"batch_size": 1.5}, ValueError, "got 1.5"),
        ({"max_concurrency": -1}, ValueError, "got -1"),
        ({"download_func": "fetch"}, TypeError, "download_func .* got 'fetch'"),
        ({"transform": 3}, TypeError, "transform .* got 3"),
    ],
)
def test_invalid_arguments_are_refused(arguments, error, words):
    with pytest.raises(error, match=words):
        Dataset(**{"data": PAIRS, **arguments})


@pytest.mark.parametrize("i", [-1, 2, 99])
def test_a_shard_out_of_range_is_refused(i):
    dataset = Dataset(PAIRS)
    dataset.set_num_shards(2)
    with pytest.raises(AssertionError, match=f"from 0 to 1, got {i}"):
        dataset.get_shard(i)


def test_the_number_of_shards_must_be_positive():
    with pytest.raises(ValueError, match="num_shards"):
        Dataset(PAIRS).set_num_shards(0)


@pytest.mark.parametrize("data", [list(range(10)), lambda: range(10)])
def test_a_shard_can_be_pickled_if_its_data_can(data):
    import cloudpickle

    dataset = Dataset(data, 3, fetch, max_concurrency=1, transform=augment)
    dataset.set_num_shards(2)
    copy = pickle.loads(cloudpickle.dumps(dataset.get_shard(1)))
    dataset.set_num_shards(1)  # existing shards do not change
    assert next(iter(copy)) == [(101, -1), (103, -3), (105, -5)]


def test_a_dataset_of_a_generator_cannot_be_pickled():
    with pytest.raises(TypeError, match=r"whose data is an iterator cannot be sent.*pass a list"):
        pickle.dumps(Dataset(ten_pairs()))
