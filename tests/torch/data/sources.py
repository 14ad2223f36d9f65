"""Reads the data of a loop as a rank does: the batches of a source, in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from raysgd.core.ranks import RankInfo
from raysgd.torch.data.sources import LiveSource, PlannedSource

__all__ = ["LiveSource", "PlannedSource", "alone", "begin", "drawn", "epoch_of", "loader_of"]


@contextmanager
def alone() -> Iterator[None]:
    """Have a process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()


def begin(source: Any, epoch: int = 0, *, ranks: int = 1, shared: bool = False) -> Any:
    """Begin an epoch. With `shared`, ranks may have to agree on its order."""
    source.begin(epoch, RankInfo(world_size=ranks), shared=shared)
    return source


def drawn(source: Any, offset: int = 0, *, rank: int = 0, ranks: int = 1, generation: int = 0) -> Iterator[Any]:
    """Return an iterator over what a rank draws of the epoch, beginning at this sample of it."""
    batches: Iterator[Any] = source.batches(RankInfo(rank, ranks, generation=generation), offset)
    return batches


def epoch_of(source: Any, rank: int = 0, ranks: int = 1, *, epoch: int = 0) -> list[Any]:
    return list(drawn(begin(source, epoch, ranks=ranks), rank=rank, ranks=ranks))


def loader_of(source: PlannedSource) -> Any:
    """Return the loader from which it reads: the user's, or a copy with another order."""
    return source._twin
