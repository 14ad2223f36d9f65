"""Random numbers that belong to a place in the run, and not to a process. Both."""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any, NamedTuple

import numpy

LARGEST_SEED = 2**63 - 1


class Places(NamedTuple):
    """The places of one kind of call with one loader, in a run with a `seed`."""

    seed: int
    call: str = "train"
    loader: str = ""

    def number(self, *, epoch: int, offset: int | None = None, part: int = 0, reading: bool = False) -> int:
        return derived_seed(self.seed, self.call, self.loader, epoch, offset, part, reading)

    def enter(self, *, epoch: int, offset: int | None = None, part: int = 0, reading: bool = False) -> None:
        seed_generators(derived_seed(self.seed, self.call, self.loader, epoch, offset, part, reading))


def seed_for(
    seed: int,
    *,
    epoch: int,
    offset: int | None = None,
    part: int = 0,
    reading: bool = False,
    call: str = "train",
    loader: str = "",
) -> None:
    """Seed the generators of Python, NumPy and torch for a place in a run, as a trainer with this
    `seed` does before each part of a batch. torch's are those of the CPU and of the current GPU. A
    loop of your own draws the same numbers with

        seed_for(7, epoch=1)                             before it draws the order of the epoch
        seed_for(7, epoch=1, offset=16, reading=True)    before it reads the part from sample 16 on
        seed_for(7, epoch=1, offset=16)                  before it trains on this part

    epoch    counted from 1; of validations, tests and predictions, the number of the pass over the
             data
    offset   where the part begins in the epoch's order, in samples, or in batches of a batch
             sampler. Of data without an order, where it ends
    part     0; of data without an order, the rank; -2 for `on_step`, with the offset after the step
    reading  whether the data set gets the samples now
    call     "train", "validate", "test" or "predict"
    loader   the name of the loader, if several have been registered with names
    """
    Places(seed, call, loader).enter(epoch=epoch, offset=offset, part=part, reading=reading)


def derived_seed(seed: int, *place: Any) -> int:
    """Derive a seed for this place (numbers and strings). Places that differ in one number have
    unrelated seeds, also as NumPy reads them, which takes 32 bits."""
    text = repr((seed, *place)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") & LARGEST_SEED


def seed_generators(seed: int) -> None:
    """Seed the generators of Python, NumPy and, if it is imported, torch."""
    seed_python_and_numpy(seed)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(seed)  # torch.manual_seed takes 200 us, of which most are for other devices
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(seed)


def seed_python_and_numpy(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)
