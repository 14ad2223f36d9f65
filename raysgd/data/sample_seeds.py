"""Random numbers that belong to a sample, whichever rank or loader process handles it. Worker."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset, IterableDataset

from raysgd.config import at_least
from raysgd.errors import ConfigError, shown, suggesting
from raysgd.replica.seeding import derived_seed, seed_python_and_numpy


class SampleSeeds(Dataset[Any]):
    """The map-style data set `dataset`, whose random numbers depend on `seed`, the epoch and the
    sample's index alone.

        DataLoader(SampleSeeds(images, seed=0), batch_size=32, shuffle=True, num_workers=4)

    While it gets a sample, the CPU generators of torch, NumPy and `random` are seeded for that
    sample; afterwards they are what they were. So augmentation does not change with the number of
    workers or of loader processes, or when workers fail.

    raysgd calls `set_epoch`. In a loop of your own, call it yourself.
    """

    @suggesting
    def __init__(self, dataset: Any, seed: int) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise ConfigError(
                f"SampleSeeds seeds each sample by its index, and got {shown(dataset)}, whose samples have none: pass a data "
                "set with __getitem__"
            )
        at_least("seed", seed, 0, whole=True)
        self.dataset, self.seed = dataset, seed
        # Persistent loader processes have a copy of this object from an earlier epoch, so all copies share one number.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Set the `epoch` on which the random numbers depend."""
        self._epoch.fill_(epoch)
        if callable(inner := getattr(self.dataset, "set_epoch", None)):
            inner(epoch)

    def __getitem__(self, index: Any) -> Any:
        with seeded_for(self.seed, int(self._epoch), index):
            return self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._epoch.share_memory_()  # it is not shared if this object was not pickled for a loader process


@contextmanager
def seeded_for(seed: int, epoch: int, index: Any) -> Iterator[None]:
    """A context in which the CPU generators are seeded for one sample of one epoch. `index` is a
    number, or a key with a `repr` of its own."""
    with suppress(TypeError):
        index = operator.index(index)  # of NumPy and torch, too
    number = derived_seed(seed, "sample", epoch, index)
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        seed_python_and_numpy(number)
        torch.default_generator.manual_seed(number)  # torch.manual_seed would also seed the GPUs
        yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
        torch.set_rng_state(states[2])
