"""Short descriptions of a loader's rows, to compare ranks and checkpoints. Worker."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, SubsetRandomSampler

from raysgd.errors import counted
from raysgd.torch.data.sampling import has_own_batches

MOST_INDICES = 1_000_000  # of each list; from a longer one, that many are taken at equal distances


@dataclass(frozen=True)
class LoaderRows:
    """What is known of a map-style loader's rows.

    units    how many samples an epoch has, None if the user's batch sampler decides that
    indices  a digest of the indices by which the data set was divided before, as `random_split` and
             `SubsetRandomSampler` do; an empty string if it was not
    """

    units: int | None = None
    indices: str = ""

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> LoaderRows:
        digest, has_indices = 0, False
        for indices in _index_lists([loader.dataset, loader.sampler, loader.batch_sampler], set()):
            digest, has_indices = zlib.crc32(indices.astype("int64").tobytes(), digest), True
        sampler: Any = loader.sampler
        counted = not has_own_batches(loader) and hasattr(type(sampler), "__len__")
        return cls(len(sampler) if counted else None, f"{digest:08x}" if has_indices else "")

    @property
    def for_ranks(self) -> str:
        """What must be equal on all ranks, in words; an empty string if nothing is known."""
        known = {
            counted(self.units or 0, "row"): self.units is not None,
            f"the indices {self.indices}": bool(self.indices),
        }
        return " with ".join(name for name, is_known in known.items() if is_known)


def _index_lists(parts: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the lists of indices of data sets and samplers, and of those inside them. Others than
    torch's classes may change theirs in each epoch."""
    for part in parts:
        if not isinstance(part, (Dataset, Sampler)) or id(part) in seen:
            continue
        seen.add(id(part))
        indices: Any = part.indices if isinstance(part, (Subset, SubsetRandomSampler)) else ()
        if isinstance(indices, torch.Tensor):
            indices = indices.cpu().numpy()
        if isinstance(indices, (list, tuple, range, numpy.ndarray)) and len(indices):
            some = indices[:: max(len(indices) // MOST_INDICES, 1)]
            if isinstance(some[0], (int, numpy.integer)):
                yield numpy.asarray(some)
        for value in getattr(part, "__dict__", {}).values():
            several = isinstance(value, (list, tuple)) and value and isinstance(value[0], Dataset)
            yield from _index_lists(value if several else [value], seen)
