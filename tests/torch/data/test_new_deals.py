"""Map-style loaders whose parts are dealt to the ranks in another way, in the middle of epochs.

Both ranks are played in this process: each has its own copy of the loader, as workers have.
"""

import multiprocessing
import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler

from raysgd.core.decisions.sampling_plan import Division
from raysgd.core.outcomes import DataLoaderFailure
from raysgd.replica.seeding import Places
from raysgd.replica.steps.feed import Carrier, Reader
from raysgd.torch.foreign import loader_with
from tests.torch.data.sources import PlannedSource, begin, drawn
from tests.torch.small import Numbers

ROWS, BATCH, PARTS = 60, 4, 4  # a step has 8 rows, the last one 4


class Augmented(Numbers):
    """Returns which process has read a row, and what it has drawn for it."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        drawn_now = random.random(), numpy.random.rand(), torch.rand(()).item()
        return torch.tensor([index, os.getpid(), self.epoch, *drawn_now], dtype=torch.float64)


class OwnPasses(DataLoader[Any]):
    """Begins its passes in its own way, so raysgd lets it do that."""

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "no processes": lambda: DataLoader(Augmented(ROWS), batch_size=BATCH, shuffle=True),
    "processes": lambda: DataLoader(Augmented(ROWS), batch_size=BATCH, shuffle=True, num_workers=2, timeout=60),
    "persistent": lambda: DataLoader(
        Augmented(ROWS), batch_size=BATCH, shuffle=True, num_workers=2, timeout=60, persistent_workers=True
    ),
    "own sampler": lambda: DataLoader(
        Augmented(ROWS), batch_size=BATCH, sampler=range(ROWS - 1, -1, -1), num_workers=1, timeout=60
    ),
    "own passes": lambda: OwnPasses(Augmented(ROWS), batch_size=BATCH, num_workers=1, timeout=60),
    "batches in any order": lambda: DataLoader(
        Augmented(ROWS),
        batch_size=BATCH,
        sampler=SequentialSampler(range(ROWS)),
        num_workers=2,
        timeout=60,
        prefetch_factor=4,
    ),
}


class Ranks:
    """Two ranks with copies of a loader, and what they have read by epoch and row, in parts that count."""

    def __init__(self, name: str, **changed: Any) -> None:
        self.deal, self.persist = (2, 2), LOADERS[name]().persistent_workers
        divided: Any = {"pad": True, "division": lambda ranks: Division(2, PARTS, self.deal), "places": Places(7)}
        self.sources = [PlannedSource(loader_with(LOADERS[name](), **changed), **divided) for _ in range(2)]
        self.rows: dict[tuple[int, int], list[float]] = {}
        self.processes: dict[tuple[int, int], set[float]] = defaultdict(set)  # by rank and epoch

    def epoch(self, epoch: int, *, deal: Callable[[], tuple[int, int]], ahead: bool) -> None:
        """Train on an epoch, with the next deal before each step."""
        for source in self.sources:
            torch.manual_seed(epoch)  # as if rank 0 had sent its order
            begin(source, epoch)
        offset, before = 0, (0, 0)
        readers: list[Reader] = []
        while offset < ROWS:
            self.deal = deal()
            if self.deal != before:
                before, opened = (
                    self.deal,
                    [drawn(each, offset, rank=r, ranks=2) for r, each in enumerate(self.sources)],
                )
                readers = [Reader(each, Carrier(), ahead=ahead) for each in opened]
            offset, _ = [self.step(epoch, rank, reader) for rank, reader in enumerate(readers)]
        assert [reader.read() for reader in readers] == [None, None]

    def step(self, epoch: int, rank: int, reader: Reader) -> int:
        while (drawn := reader.read()) is not None:
            for index, process, seen, *numbers in drawn.batch.tolist():
                assert self.persist or seen == epoch, "a process has the data set of another epoch"
                assert not drawn.fresh or (epoch, index) not in self.rows, "a row is used twice"
                self.rows[epoch, int(index)] = numbers
                self.processes[rank, epoch].add(process)
            if drawn.last_part:
                return int(drawn.offset)
        raise AssertionError("the epoch has ended too early")

    def close(self) -> None:
        for source in self.sources:
            source.close()


@pytest.mark.parametrize(
    ("name", "ahead"), [*((each, False) for each in LOADERS), ("processes", True), ("persistent", True)]
)
def test_each_row_is_read_once_with_the_same_random_numbers_by_the_same_processes(name: str, ahead: bool) -> None:
    here = {"num_workers": 0, "prefetch_factor": None, "timeout": 0, "persistent_workers": False}
    usual, dealt, draw = Ranks(name, **here), Ranks(name), random.Random(name)
    for epoch in range(3):
        usual.epoch(epoch, deal=lambda: (2, 2), ahead=ahead)
        dealt.epoch(epoch, deal=lambda: draw.choice([(1, 3), (2, 2), (3, 1)]), ahead=ahead)
    assert dealt.rows.keys() == {(epoch, row) for epoch in range(3) for row in range(ROWS)}
    assert dealt.rows == usual.rows
    if name != "own passes":
        processes = max(LOADERS[name]().num_workers, 1)
        assert all(len(each) == processes for each in dealt.processes.values())
    if name == "persistent":
        assert dealt.processes[0, 0] == dealt.processes[0, 1] == dealt.processes[0, 2]
    dealt.close()
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("begun", [False, True])
def test_processes_that_were_kept_end_with_the_source(begun: bool) -> None:
    ranks = Ranks("processes")
    source = begin(ranks.sources[0])
    next(drawn(source, ranks=2))
    kept, ranks.deal = multiprocessing.active_children(), (3, 1)
    later = drawn(source, 8, ranks=2)
    if begun:
        next(later)
    assert set(multiprocessing.active_children()) == set(kept) and len(kept) == 2
    ranks.close()
    assert not any(each.is_alive() for each in kept)


@pytest.mark.parametrize("asked", [True, False], ids=["in the epoch", "at its end"])
def test_processes_that_were_kept_are_not_used_in_the_next_epoch(asked: bool) -> None:
    """They have the data set as it was."""
    ranks = Ranks("processes")
    source = begin(ranks.sources[0])
    next(drawn(source, ranks=2))
    kept, ranks.deal = multiprocessing.active_children(), (3, 1)
    if asked:
        drawn(source, 8, ranks=2)
    first = next(drawn(begin(source, 1), ranks=2)).batch.tolist()
    assert first[0][2] == 1 and not any(each.is_alive() for each in kept)
    ranks.close()


def test_a_process_that_was_killed_before_a_new_deal() -> None:
    ranks = Ranks("processes")
    source = begin(ranks.sources[0])
    next(drawn(source, ranks=2))
    victim, *_ = multiprocessing.active_children()
    victim.kill()
    victim.join()
    ranks.deal = (3, 1)
    with pytest.raises(DataLoaderFailure, match=f"process {victim.pid} was killed by SIGKILL"):
        next(drawn(source, 8, ranks=2))
    first = next(drawn(source, 8, ranks=2))
    assert [row[0] for row in first.batch.tolist()] == [int(each) for each in source.order[8:10]]
    ranks.close()
