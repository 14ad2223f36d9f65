"""A step has the same samples on any number of workers, and its mean loss the same weights."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

pytest.importorskip("lightning")

from raysgd.core.ranks import RankInfo
from raysgd.train.lightning.continuation import DividedLoader


class Fit:
    """Stands for a `Continuation` of one rank, whose loop has done `done` batches of the epoch."""

    def __init__(self, rank: int, world: int, done: int = 0) -> None:
        self.rank_info, self.weight = RankInfo(world_rank=rank, world_size=world), 1.0
        self.trainer = SimpleNamespace(fit_loop=SimpleNamespace(batch_idx=done - 1))

    def put_back(self) -> None:
        pass

    def before(self, batch: int) -> None:
        """There is nothing to commit."""


def batches_of(loader: DataLoader[Any], workers: int, rank: int, world: int, done: int = 0) -> list[tuple[Any, float]]:
    fit = Fit(rank, world, done)
    divided = DividedLoader(loader, fit, workers=workers)  # type: ignore[arg-type]
    divided.sampler.set_epoch(3)
    return [(batch.tolist(), fit.weight) for batch in divided]


def loader_of(size: int, *, workers: int, rank: int, shuffle: bool = True, drop_last: bool = False) -> DataLoader[Any]:
    """Return a loader as Lightning prepares it for this rank."""
    data: Any = torch.arange(size)
    sampler: Any = DistributedSampler(data, num_replicas=workers, rank=rank, shuffle=shuffle, seed=5)
    sampler.set_epoch(3)
    return DataLoader(data, batch_size=4, sampler=sampler, drop_last=drop_last)


@settings(deadline=None)
@given(samples=st.integers(1, 30), world=st.integers(1, 9))
def test_each_sample_counts_once(samples: int, world: int) -> None:
    """In a step that is not complete, on more or fewer ranks than it has samples."""
    counts = dict.fromkeys(range(samples), 0.0)
    for rank in range(world):
        ((mine, weight),) = batches_of(loader_of(samples, workers=8, rank=0), 8, rank, world)
        for each in mine:
            counts[each] += weight / len(mine) / world
    assert list(counts.values()) == pytest.approx([1 / samples] * samples)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_first_workers_have_the_batches_of_lightning(workers: int, shuffle: bool) -> None:
    for rank in range(workers):
        loader = loader_of(12 * workers, workers=workers, rank=rank, shuffle=shuffle)
        expected = [(batch.tolist(), 1.0) for batch in loader]
        assert batches_of(loader, workers, rank, workers) == expected


@pytest.mark.parametrize(("drop_last", "steps"), [(True, 4), (False, 5)])
def test_a_resumed_epoch_has_the_rest_of_the_steps(drop_last: bool, steps: int) -> None:
    loader = loader_of(51, workers=3, rank=0, drop_last=drop_last)
    all_of = [sorted(batch) for batch, _ in batches_of(loader, 3, 0, 1)]
    assert len(all_of) == steps
    for world in (2, 5):
        by_rank = [batches_of(loader, 3, rank, world, done=2) for rank in range(world)]
        for step, shares in zip(all_of[2:], zip(*by_rank, strict=True), strict=True):
            assert sorted(sample for batch, weight in shares if weight for sample in batch) == step
