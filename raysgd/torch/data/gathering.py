"""Read the batches of a `TensorDataset` with one index operation instead of sample by sample, with equal results. Worker."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

__all__ = ["Gathered", "can_gather", "gathering"]


class Gathered(Dataset[Any]):
    """A `TensorDataset` that returns complete batches, for a loader that does not collate."""

    def __init__(self, dataset: TensorDataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: list[Any]) -> Any:
        if set(map(type, indices)) != {int}:  # a user's sampler may yield indices of any type
            return default_collate([self._dataset[index] for index in indices])
        chosen = torch.tensor(indices)
        return [tensor[chosen] for tensor in self._dataset.tensors]


def gathering(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the attributes that let a copy of this loader gather its batches, or an empty dictionary if it cannot."""
    if not can_gather(loader):
        return {}
    return {"dataset": Gathered(loader.dataset), "collate_fn": _unchanged}  # type: ignore[arg-type]


def can_gather(loader: DataLoader[Any]) -> bool:
    """Return whether the loader's batches are rows of plain tensors in main memory.

    Loaders with processes are excluded: the processes cost more than they save here, but the user asked for them, and they
    must see the user's own data set.
    """
    dataset = loader.dataset
    return (
        type(loader) is DataLoader
        and type(dataset) is TensorDataset
        and loader.collate_fn is default_collate
        and loader.batch_sampler is not None
        and loader.num_workers == 0
        and all(map(_is_plain, dataset.tensors))
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and not tensor.is_quantized
    )


def _unchanged(batch: Any) -> Any:
    return batch
