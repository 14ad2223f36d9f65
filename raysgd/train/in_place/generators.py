"""The states of a process's random generators: Python's, NumPy's and torch's. Worker."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch


def generator_states() -> tuple[Any, ...]:
    on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return random.getstate(), numpy.random.get_state(), torch.get_rng_state(), on_gpu


def set_generators(states: tuple[Any, ...]) -> None:
    """Let the generators continue where they were when `generator_states` returned these."""
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    torch.set_rng_state(states[2])
    if states[3] is not None:
        torch.cuda.set_rng_state(states[3])
