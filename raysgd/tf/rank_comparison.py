"""Summarize an operator's weights and settings, for the comparison of ranks. Worker."""

from __future__ import annotations

from numbers import Real

import numpy as np

from raysgd.core.rank_comparison import Summary
from raysgd.tf.parts import KerasParts, as_tensor
from raysgd.training.rank_comparison import BLOCK, Products, direction, numbers


def summary_of(parts: KerasParts) -> Summary:
    """Return what this rank reports: the variables that the registered models train, and the
    numbers among the settings of their optimizers. Names of layers and optimizers are left out,
    because Keras numbers them in each process."""
    variables = {
        f"{variable.name.rpartition('/')[2].partition(':')[0]} (variable {place}) of models[{number}]": variable
        for number, model in enumerate(parts.models)
        for place, variable in enumerate(model.trainable_variables)
    }
    read = {name: _read(as_tensor(each).numpy().reshape(-1)) for name, each in variables.items()}
    settings = {
        f"{key} of optimizers[{number}] ({type(optimizer).__name__})": float(value)
        for number, optimizer in enumerate(parts.optimizers)
        for key, value in optimizer.get_config().items()
        if isinstance(value, Real)
    }
    return Summary(numbers(read), {}, settings)


def _read(flat: np.ndarray) -> Products:
    whole = flat.size // BLOCK * BLOCK
    blocks = flat[:whole].astype(flat.dtype if flat.dtype.itemsize > 2 else np.float32).reshape(-1, BLOCK)
    rest = flat[whole:].astype(np.float64)
    products = np.concatenate([blocks @ direction().astype(blocks.dtype), rest]).astype(np.float64)
    return Products(products, flat.size, flat.dtype.name)
