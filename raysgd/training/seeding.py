"""Seeds for every place of a run, from the trainer's `seed`. Both."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy

LARGEST_SEED = 2**63 - 1


def derived_seed(seed: int, *place: Any) -> int:
    """Return a seed for this place (numbers and strings). Places that differ in one number have
    unrelated seeds, also as NumPy reads them, which takes 32 bits."""
    text = repr((seed, *place)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") & LARGEST_SEED


def seed_python_and_numpy(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFFFFFF)
