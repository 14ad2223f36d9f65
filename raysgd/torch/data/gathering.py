"""Batches of samples that lie in memory as tensors: gathered at once, not sample by sample. Equal to what is collated."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

__all__ = ["Gathered", "can_gather", "gathering"]


class Gathered(Dataset[Any]):
    """A `TensorDataset` that hands out whole batches, for a loader that has nothing left to collate."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: list[Any]) -> Any:
        if set(map(type, indices)) != {int}:  # whatever else a sampler of the user's says
            return default_collate([self._dataset[index] for index in indices])
        chosen = torch.tensor(indices)
        return [tensor[chosen] for tensor in self._dataset.tensors]


def gathering(loader: DataLoader[Any]) -> dict[str, Any]:
    """What a loader of these samples has to have in place of its own to gather them; nothing, where it cannot."""
    if not can_gather(loader):
        return {}
    return {"dataset": Gathered(loader.dataset), "collate_fn": _as_it_is}  # type: ignore[arg-type]


def can_gather(loader: DataLoader[Any]) -> bool:
    """Is a batch of it just these rows of plain tensors in main memory? (Loader processes cost more than they save here, but they are
    what was asked for, and see the user's own data set.)"""
    dataset = loader.dataset
    return (
        type(loader) is DataLoader
        and type(dataset) is TensorDataset
        and loader.collate_fn is default_collate
        and loader.batch_sampler is not None
        and loader.num_workers == 0
        and all(map(_plain, dataset.tensors))
    )


def _plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and not tensor.is_quantized
    )


def _as_it_is(batch: Any) -> Any:
    return batch
