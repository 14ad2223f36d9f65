"""Tensors in memory: gathered batches equal those that a DataLoader collates."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, Subset, TensorDataset

from raysgd.torch.data.prefetch import make_carrier
from raysgd.torch.data.sampling import Gathered, can_gather
from tests.torch.data.sources import PlannedSource, begin, drawn, epoch_of, loader_of

ROWS = 23


def tensors() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(ROWS, 3, 4, 4, generator=generator)
    return TensorDataset(images, torch.arange(ROWS), torch.arange(ROWS) % 2 == 0, images.half())


class Odd:
    """A sampler that returns its indices as other types."""

    def __init__(self, *indices: Any) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[Any]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


LOADERS = {
    "in order": lambda: DataLoader(tensors(), batch_size=4),
    "shuffled": lambda: DataLoader(tensors(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(2)),
    "one tensor": lambda: DataLoader(TensorDataset(torch.arange(5.0)), batch_size=2),
    "own batches": lambda: DataLoader(
        tensors(), batch_sampler=BatchSampler(SequentialSampler(range(ROWS)), 5, drop_last=False)
    ),
    "negative": lambda: DataLoader(tensors(), batch_size=2, sampler=Odd(-1, 3, -2)),
    "tensors as indices": lambda: DataLoader(tensors(), batch_size=2, sampler=Odd(*torch.tensor([4, 2, 9]))),
    "empty slices": lambda: DataLoader(TensorDataset(torch.zeros(3, 0)), batch_size=2),
}
NOT_GATHERED = {
    "another data set": lambda: DataLoader(Subset(tensors(), range(9)), batch_size=4),
    "a subclass": lambda: DataLoader(type("Own", (TensorDataset,), {})(torch.zeros(3)), batch_size=2),
    "a collate of one's own": lambda: DataLoader(tensors(), batch_size=4, collate_fn=lambda rows: rows),
    "single samples": lambda: DataLoader(tensors(), batch_size=None),
    "processes": lambda: DataLoader(tensors(), batch_size=4, num_workers=1),
    "another order in memory": lambda: DataLoader(TensorDataset(torch.randn(3, 4).t()), batch_size=2),
    "another device": lambda: DataLoader(TensorDataset(torch.empty(3, device="meta")), batch_size=2),
    "a gradient": lambda: DataLoader(TensorDataset(torch.zeros(3, requires_grad=True)), batch_size=2),
}


GPU = torch.device("cuda:0")


def planned(loader: DataLoader[Any], device: torch.device | None = None) -> list[Any]:
    return [each.batch for each in epoch_of(PlannedSource(loader, pad=False, device=device))]


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Let tensors be allocated that stand for pinned ones, and return these."""
    found: list[torch.Tensor] = []
    empty = torch.empty

    def allocated(*given: Any, pin_memory: bool = False, **named: Any) -> torch.Tensor:
        made = empty(*given, **named)
        if pin_memory:
            found.append(made)
        return made

    monkeypatch.setattr(torch, "empty", allocated)
    return found


@pytest.mark.parametrize("device", [None, GPU], ids=["here", "for a GPU"])
@pytest.mark.parametrize("name", LOADERS)
def test_gathered_batches_equal_collated_ones(
    name: str, device: torch.device | None, pinned: list[torch.Tensor]
) -> None:
    assert can_gather(LOADERS[name]())
    expected, got = list(LOADERS[name]()), planned(LOADERS[name](), device)
    in_pinned = {id(each) for each in pinned} & {id(part) for batch in got for part in batch}
    listed = name in ("own batches", "negative", "tensors as indices")
    assert len(in_pinned) == (0 if device is None or listed else sum(map(len, got)))
    assert len(got) == len(expected) > 0
    for mine, theirs in zip(got, expected, strict=True):
        assert type(mine) is type(theirs) and len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert one.dtype == other.dtype and one.stride() == other.stride()
            assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("pin_memory", [False, True])
def test_batches_for_a_gpu_are_in_pinned_memory_that_is_used_again(shuffle: bool, pin_memory: bool) -> None:
    """They arrive complete, although their memory is that of earlier batches."""
    data = TensorDataset(torch.randn(64, 3, 128, 128), torch.arange(64))
    loader = DataLoader(data, batch_size=4, shuffle=shuffle, pin_memory=pin_memory)
    source, carrier = PlannedSource(loader, pad=False, device=GPU), make_carrier(GPU, channels_last=True)
    seen, places = [], set()
    for epoch in range(4):
        for each in drawn(begin(source, epoch)):
            assert all(part.is_pinned() for part in each.batch)
            places.add(each.batch[0].data_ptr())
            seen.append(carrier.arrived(carrier.send(each.batch)))
    for images, rows in seen:
        assert torch.equal(images.cpu(), data.tensors[0][rows.cpu()])
    assert len(places) < len(seen)


def test_other_data_sets_are_not_gathered() -> None:
    for name, make in NOT_GATHERED.items():
        loader = make()
        assert not can_gather(loader), name
        assert loader_of(PlannedSource(loader, pad=False)).dataset is loader.dataset


def test_a_sampler_of_more_rows_than_there_are_is_an_error(pinned: list[torch.Tensor]) -> None:
    loader = DataLoader(tensors(), batch_size=4, sampler=SequentialSampler(range(ROWS + 1)))
    for device in (None, GPU):
        with pytest.raises(RuntimeError, match="exceeds dimension size"):
            planned(loader, device)


def test_a_batch_is_a_copy_and_what_is_not_an_index_is_passed_to_the_data_set() -> None:
    dataset = TensorDataset(torch.arange(6.0))
    ((batch,),) = Gathered(dataset, [[1, 2]])
    batch.zero_()
    assert dataset.tensors[0].tolist() == [0, 1, 2, 3, 4, 5]
    ((batch,),) = Gathered(dataset, [[slice(0, 2), slice(3, 5)]])
    assert batch.tolist() == [[0, 1], [3, 4]]
