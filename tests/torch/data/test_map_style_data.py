"""Map-style loaders divided over ranks: the order and the options of every kind of loader are kept.

Ranks are played one after the other, in this process: each has its own copy of the loader, as workers have.
"""

import copy
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from raysgd import ConfigError
from raysgd.torch.data import loading
from tests.torch.data.sources import PlannedSource, alone, begin, drawn, epoch_of, loader_of
from tests.torch.small import Numbers, flat

Loaders = Callable[[], DataLoader[Any]]


def played(make: Loaders, world: int, *, pad: bool = True, epoch: int = 0) -> list[list[Any]]:
    """Return each rank's epoch. All copies draw the same order, as if rank 0 had sent its order to the others."""
    ranks = []
    for rank in range(world):
        torch.manual_seed(7)
        ranks.append(epoch_of(PlannedSource(make(), pad=pad), rank, world, epoch=epoch))
    return ranks


def batches(of_a_rank: list[Any]) -> list[list[int]]:
    return [each.batch.tolist() for each in of_a_rank]


def plain_epoch(make: Loaders) -> list[list[int]]:
    torch.manual_seed(7)
    return [batch.tolist() for batch in make()]


class Evens(Sampler[int]):
    """A user's sampler: even numbers in descending order."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count - 2, -1, -2))

    def __len__(self) -> int:
        return self.count // 2


class ByLength(Sampler[list[int]]):
    """A user's batch sampler, whose batches grow."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for size in self.sizes:
            yield list(range(start, start + size))
            start += size

    def __len__(self) -> int:
        return len(self.sizes)


LOADERS: dict[str, Loaders] = {
    "in order": lambda: DataLoader(Numbers(22), batch_size=3),
    "shuffled": lambda: DataLoader(Numbers(22), batch_size=3, shuffle=True),
    "subset": lambda: DataLoader(Numbers(22), batch_size=3, sampler=SubsetRandomSampler(range(4, 20))),
    "weighted": lambda: DataLoader(Numbers(22), batch_size=3, sampler=WeightedRandomSampler([1.0] * 22, 30)),
    "own sampler": lambda: DataLoader(Numbers(22), batch_size=3, sampler=Evens(22)),
    "a list as sampler": lambda: DataLoader(Numbers(22), batch_size=3, sampler=[5, 3, 3, 1, 0, 9, 8]),
    "torch's batch sampler": lambda: DataLoader(
        Numbers(22), batch_sampler=BatchSampler(SequentialSampler(range(22)), 3, drop_last=False)
    ),
    "one sample": lambda: DataLoader(Numbers(1), batch_size=3),
}


@pytest.mark.parametrize("name", LOADERS)
def test_one_rank_gets_the_batches_of_the_plain_loader(name: str) -> None:
    make = LOADERS[name]
    (alone,) = played(make, 1)
    assert batches(alone) == plain_epoch(make)


@pytest.mark.parametrize("name", LOADERS)
def test_several_ranks_share_the_same_epoch(name: str) -> None:
    make = LOADERS[name]
    for world in (2, 5):
        ranks = played(make, world)
        assert len({len(rank) for rank in ranks}) == 1, "every rank takes every step"
        fresh = flat([each.batch.tolist() for rank in ranks for each in rank if each.fresh])
        assert Counter(fresh) == Counter(flat(plain_epoch(make)))


def test_the_last_samples_are_divided_or_dropped() -> None:
    ranks = played(lambda: DataLoader(Numbers(101), batch_size=32), 2)
    assert [[len(batch) for batch in batches(rank)] for rank in ranks] == [[32, 19], [32, 18]]
    ranks = played(lambda: DataLoader(Numbers(101), batch_size=32, drop_last=True), 2)
    assert [[len(batch) for batch in batches(rank)] for rank in ranks] == [[32], [32]]
    assert played(lambda: DataLoader(Numbers(31), batch_size=32, drop_last=True), 2) == [[], []]
    assert played(lambda: DataLoader(Numbers(0), batch_size=3), 2) == [[], []]


def test_batches_of_a_batch_sampler_are_not_split_except_in_the_last_step() -> None:
    make = lambda: DataLoader(Numbers(100), batch_sampler=ByLength(1, 2, 3, 4, 5))  # noqa: E731
    ranks = played(make, 2)
    assert [len(batch) for batch in batches(ranks[0])] == [1, 3, 3]
    assert [len(batch) for batch in batches(ranks[1])] == [2, 4, 2]
    assert sorted(flat(batches(ranks[0] + ranks[1]))) == list(range(15))
    assert played(make, 1)[0][4].batch.tolist() == [10, 11, 12, 13, 14]


def test_a_sampler_that_returns_batches() -> None:
    """With DataLoader(sampler=BatchSampler(...), batch_size=None), the data set receives lists of indices."""

    class Lists(Numbers):
        def __getitem__(self, index: Any) -> Any:
            return torch.tensor(index)

    sampler = BatchSampler(SequentialSampler(range(10)), 3, drop_last=False)
    ranks = played(lambda: DataLoader(Lists(10), sampler=sampler, batch_size=None), 2)
    assert batches(ranks[0]) == [[0, 1, 2], [6, 7, 8]]
    assert batches(ranks[1]) == [[3, 4, 5], [9]]


def test_without_batches_rank_gets_items() -> None:
    ranks = played(lambda: DataLoader(Numbers(5), batch_size=None), 2)
    assert [[each.batch for each in rank] for rank in ranks] == [[0, 2, 4], [1, 3, 4]]
    assert [each.fresh for each in ranks[1]] == [True, True, False]


def test_a_users_distributed_sampler_is_used_as_if_it_had_one_rank() -> None:
    def make() -> DataLoader[Any]:
        data = Numbers(10)
        return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, num_replicas=2, rank=1, seed=3))

    seen = {}
    for epoch in (0, 1):
        ranks = played(make, 2, epoch=epoch)
        seen[epoch] = list(flat(batches(ranks[0] + ranks[1])))
        assert sorted(seen[epoch]) == list(range(10))
    assert seen[0] != seen[1], "set_epoch reshuffles"


def test_a_sampler_without_a_length_says_what_to_do() -> None:
    class Endless(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(int, 1)

    source = PlannedSource(DataLoader(Numbers(4), sampler=Endless()), pad=True)
    with pytest.raises(ConfigError, match=r"Endless has no length.*__len__.*IterableDataset"):
        begin(source)


def test_set_epoch_is_called_on_each_part_of_a_loader() -> None:
    told: list[tuple[str, int]] = []

    class Told(Numbers):
        def set_epoch(self, epoch: int) -> None:
            told.append(("dataset", epoch))

    class ToldSampler(Evens):
        def set_epoch(self, epoch: int) -> None:
            told.append(("sampler", epoch))

    source = PlannedSource(DataLoader(Told(4), sampler=ToldSampler(4)), pad=True)
    for epoch in (0, 1):
        begin(source, epoch)
    assert told == [("sampler", 0), ("dataset", 0), ("sampler", 1), ("dataset", 1)]


class Own(DataLoader[Any]):
    """A user's loader class, with attributes and methods of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.factor = 10

    def __iter__(self) -> Any:
        return (batch * self.factor for batch in super().__iter__())


def collate(items: list[int]) -> torch.Tensor:
    return torch.tensor(items) + 100


def test_every_option_of_the_loader_is_kept() -> None:
    generator = torch.Generator().manual_seed(1)
    options: dict[str, Any] = {"collate_fn": collate, "timeout": 3.0, "generator": generator}
    make = lambda: Own(Numbers(4), batch_size=2, num_workers=0, **{**options, "timeout": 0})  # noqa: E731
    (alone,) = played(make, 1)
    assert batches(alone) == [[1000, 1010], [1020, 1030]]

    given = Own(
        Numbers(4), batch_size=2, num_workers=2, prefetch_factor=5, persistent_workers=True,
        worker_init_fn=print, multiprocessing_context="spawn", pin_memory=False, **options,
    )  # fmt: skip
    twin = loader_of(PlannedSource(given, pad=True))
    assert type(twin) is Own
    kept = "prefetch_factor persistent_workers worker_init_fn multiprocessing_context timeout num_workers"
    for name in f"{kept} collate_fn pin_memory dataset batch_size".split():
        assert getattr(twin, name) == getattr(given, name), name
    assert isinstance(given.sampler, SequentialSampler), "the user's loader is not changed"


class WhichWorker(Numbers):
    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return torch.tensor([index, info.id, torch.initial_seed() % 1000])


def test_persistent_loader_processes_follow_a_new_plan() -> None:
    """In three epochs, the second of which is divided again in its middle, the processes stay, and none uses an old plan."""
    loader = DataLoader(WhichWorker(16), batch_size=2, num_workers=2, persistent_workers=True, shuffle=True, timeout=30)
    source, others = PlannedSource(loader, pad=True), set(multiprocessing.active_children())

    def numbers(of_a_rank: list[Any]) -> list[int]:
        return list(flat([each.batch[:, 0].tolist() for each in of_a_rank]))

    assert sorted(numbers(epoch_of(source))) == list(range(16))
    processes = set(multiprocessing.active_children()) - others
    assert len(processes) == 2

    running = drawn(begin(source, 1))
    taken = [next(running) for _ in range(3)]
    order = [int(index) for index in source.order]
    later = list(drawn(source, taken[-1].offset, rank=1, ranks=2, generation=1))
    assert numbers(taken) == order[:6]
    assert numbers(later) == [*order[8:10], *order[12:14], order[15]]

    assert sorted(numbers(epoch_of(source, epoch=2))) == list(range(16))
    assert set(multiprocessing.active_children()) - others == processes
    source.close()
    assert not any(process.is_alive() for process in processes)


def test_loader_processes_end_before_those_of_the_next_division_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a traceback keeps the iterator. The new processes, which are forked, would have a copy of it, and torch would
    print an error there when it is collected."""
    monkeypatch.setattr(loading, "END_S", 60 * loading.END_S)  # this machine may be busy
    source = begin(PlannedSource(DataLoader(WhichWorker(16), batch_size=2, num_workers=2, timeout=30), pad=True))
    others = set(multiprocessing.active_children())
    running = drawn(source)
    offset = next(running).offset
    before = set(multiprocessing.active_children()) - others
    later = drawn(source, offset, rank=1, ranks=2, generation=1)
    assert len(before) == 2
    assert not any(process.is_alive() for process in before)
    assert list(later) and next(running, None) is None


def test_the_position_in_an_epoch_is_kept_between_calls_and_restored_in_a_copy() -> None:
    make = LOADERS["shuffled"]
    torch.manual_seed(7)
    source = begin(PlannedSource(make(), pad=True))
    running = drawn(source)
    first = [next(running) for _ in range(2)]
    assert drawn(source, 6) is running, "the same iterator continues: nothing is read twice"

    elsewhere = PlannedSource(make(), pad=True)
    elsewhere.order = copy.deepcopy(source.order)
    rest = list(drawn(elsewhere, first[-1].offset))
    assert batches(first + rest) == plain_epoch(make)


class PartOfRank(Evens):
    """Draws the part of one rank, as a script for DistributedDataParallel may."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(dist.get_rank(), self.count, dist.get_world_size()))


@pytest.mark.parametrize(("sampler", "lines"), [(PartOfRank, 1), (Evens, 0)])
def test_a_sampler_that_asks_for_the_rank_is_named_once(
    sampler: type[Evens], lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    source = PlannedSource(DataLoader(Numbers(8), batch_size=2, sampler=sampler(8)), pad=True)
    with alone():
        for epoch in (0, 1):
            begin(source, epoch, ranks=2, shared=True)
    assert [f"the sampler {sampler.__name__} asks" in each for each in caplog.messages] == [True] * lines
