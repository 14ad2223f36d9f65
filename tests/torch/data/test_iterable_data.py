"""Data that can only be iterated: IterableDatasets, divided by worker info or by a hook, and plain iterables."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from raysgd.torch.data.iterable import RankShard
from raysgd.torch.foreign import end_processes, live_iterator, worker_info, worker_info_seen_as
from tests.torch.data.sources import LiveSource, alone, begin, drawn, epoch_of


class Stream(IterableDataset[int]):
    """Divides itself in the usual way, by worker info."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        start, step = (info.id, info.num_workers) if info is not None else (0, 1)
        yield from range(start, self.count, step)


class Lazy(Stream):
    """Reads the worker info at each item, and not before the first one."""

    def __iter__(self) -> Iterator[int]:
        for number in range(self.count):
            info = get_worker_info()
            if info is None or number % info.num_workers == info.id:
                yield number


class Hooked(IterableDataset[int]):
    rank, world = 0, 1

    def shard(self, rank: int, world_size: int) -> None:
        self.rank, self.world = rank, world_size

    def __iter__(self) -> Iterator[int]:
        yield from range(self.rank, 10, self.world)


class Ranged(IterableDataset[int]):
    """Is divided by a worker_init_fn, as in torch's documentation."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end))


def split(worker_id: int) -> None:
    info = get_worker_info()
    assert info is not None
    data: Any = info.dataset
    each = -(-(data.end - data.start) // info.num_workers)
    start = data.start + info.id * each
    data.start, data.end = start, min(start + each, data.end)


def shares(loader: Any, world: int) -> list[list[int]]:
    taken = []
    for rank in range(world):
        batches = epoch_of(LiveSource(loader, shard=True, together=False), rank, world)
        taken.append([number for each in batches for number in torch.as_tensor(each.batch).flatten().tolist()])
    return taken


@pytest.mark.parametrize("kind", [Stream, Lazy])
def test_ranks_are_seen_as_workers(kind: Any) -> None:
    loader = DataLoader(kind(10), batch_size=2)
    for world in (1, 3):
        assert shares(loader, world) == [list(range(rank, 10, world)) for rank in range(world)]
        assert get_worker_info() is None, "nothing is left behind in this process"
    assert list(loader.dataset) == list(range(10))


def test_loader_processes_of_all_ranks_count_together() -> None:
    taken = shares(DataLoader(Lazy(16), batch_size=2, num_workers=2, timeout=30), 2)
    assert [sorted(part) for part in taken] == [
        sorted([*range(0, 16, 4), *range(1, 16, 4)]),
        sorted([*range(2, 16, 4), *range(3, 16, 4)]),
    ]


def test_a_worker_init_fn_shares_the_stream_over_ranks_too() -> None:
    loader = DataLoader(Ranged(0, 16), batch_size=2, num_workers=2, worker_init_fn=split, timeout=30)
    taken = shares(loader, 2)
    assert [sorted(part) for part in taken] == [list(range(8)), list(range(8, 16))]


def test_a_data_sets_own_hook_takes_precedence() -> None:
    assert shares(DataLoader(Hooked(), batch_size=2), 2) == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    assert shares(range(4), 2) == [[0, 1, 2, 3]] * 2, "a plain iterable is not divided"


@pytest.mark.parametrize("processes", [0, 1])
def test_the_hook_is_called_again_when_the_ranks_have_changed(processes: int) -> None:
    """Also if another source of the data set has called it, as the one for validation."""
    data = Hooked()
    loader = DataLoader(data, 2, num_workers=processes, persistent_workers=processes > 0, timeout=30 * processes)
    source, other = (LiveSource(each, shard=True, together=False) for each in (loader, DataLoader(data, 2)))
    for reader, rank, ranks in ((source, 2, 3), (source, 1, 2), (source, 1, 2), (other, 0, 1), (source, 0, 1)):
        numbers = [number for each in epoch_of(reader, rank, ranks) for number in each.batch.tolist()]
        assert numbers == list(range(rank, 10, ranks))
    end_processes(live_iterator(loader))


def test_an_error_in_a_stream_resets_the_worker_info() -> None:
    class Broken(Stream):
        def __iter__(self) -> Iterator[int]:
            yield 0
            raise ValueError("no second item")

    with pytest.raises(ValueError, match="no second item"):
        shares(DataLoader(Broken(1)), 2)
    assert get_worker_info() is None


def test_a_live_source_continues_and_returns_an_uncommitted_batch_again() -> None:
    source = LiveSource(DataLoader(Stream(6), batch_size=2), shard=True, together=True)
    begin(source)
    first = next(drawn(source))
    again = next(drawn(source))
    assert again is first
    rest = list(drawn(source, 1))
    assert [each.batch.tolist() for each in rest] == [[2, 3], [4, 5]]
    assert [each.offset for each in rest] == [2, 3]


def test_each_epoch_restarts_a_generator_function_but_not_an_iterator() -> None:
    once = LiveSource(iter([1, 2]), shard=False, together=False)
    for expected in ([1, 2], []):
        assert [each.batch for each in epoch_of(once)] == expected


class ByRank(IterableDataset[int]):
    """Divides itself by torch.distributed's rank, by worker info, or by both."""

    def __init__(self, *by: str) -> None:
        self.by = by

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info() if "info" in self.by else None
        number, processes = (info.id, info.num_workers) if info is not None else (0, 1)
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if "rank" in self.by else (0, 1)
        yield from range(rank * processes + number, 16, ranks * processes)


@pytest.mark.parametrize(("by", "lines"), [(("rank", "info"), 1), (("rank",), 0), (("info",), 0)])
def test_a_stream_that_divides_itself_by_rank_and_by_worker_info_is_named_once(
    by: tuple[str, ...], lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    for rank in (0, 1):
        source = LiveSource(DataLoader(ByRank(*by), batch_size=2), shard=True, together=False)
        with alone():
            for epoch in (0, 1):
                epoch_of(source, rank, 2, epoch=epoch)
    assert ["ByRank divides itself by worker info" in each for each in caplog.messages] == [True] * lines


@pytest.mark.parametrize("process", [0, 1])
def test_the_first_loader_process_names_it(process: int, caplog: pytest.LogCaptureFixture) -> None:
    own = worker_info(id=process, num_workers=2, seed=0, dataset=None)
    shard = RankShard(ByRank("rank", "info"), 0, 2, warns=True)
    with alone(), worker_info_seen_as(own):
        assert list(shard) == list(range(process, 16, 4))
    assert len(caplog.messages) == (process == 0)
