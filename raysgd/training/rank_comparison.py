"""Summarize parameters in two numbers each, for the comparison of ranks. Worker.

A parameter is read once, in blocks, each of which is multiplied by the same pseudo-random vector.
Such products differ if two values have changed places, or a sign, which sums of values or squares
would not show.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

BLOCK = 4096
# How far apart two ranks may be, as a fraction of a parameter's norm (or of the model's mean square, if that is larger, because a bias
# can be near zero). All ranks apply the same averaged gradients, so nothing amplifies a difference between them. What differs on
# processors of two types is the rounding of single operations, by one unit in the last place: 6e-8 in float32, and after n steps at
# most about sqrt(n) as much. 1e-4 is reached after 2.8 million steps in which every element was rounded differently. Ranks that train
# on gradients of their own are further apart after one step, unless its rate is below that.
TOLERANCE = 1e-4
# Two units in the last place of types that have fewer digits, of which few elements are rounded differently in a step.
ROUGH = {"float16": 2e-3, "bfloat16": 1.6e-2}


@dataclass(frozen=True)
class Products:
    """What was calculated of a parameter.

    products  one number for each block, or the elements of a small parameter
    elements  how many elements it has
    kind      their type
    """

    products: np.ndarray
    elements: int
    kind: str


@functools.cache
def direction() -> np.ndarray:
    """The vector of one block, the same on every machine: uniformly distributed, with variance
    1."""
    vector: np.ndarray = (np.random.default_rng(0).random(BLOCK) * 2 - 1) * np.sqrt(3.0)
    return vector


def numbers(read: Mapping[str, Products]) -> dict[str, list[float]]:
    """Compute each parameter's entry in a `Summary`."""
    if not read:
        return {}
    counts = np.array([len(each.products) for each in read.values()])
    elements = np.array([float(each.elements) for each in read.values()])
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    every = np.concatenate([each.products for each in read.values()])
    place = np.arange(len(every)) - np.repeat(starts, counts)
    with np.errstate(invalid="ignore", over="ignore"):  # weights may be infinite
        projections = np.add.reduceat(every * direction()[::-1][place % BLOCK], starts)
        squares = np.add.reduceat(every**2, starts)
        finite = np.isfinite(squares)
        mean = np.sum(squares[finite]) / max(np.sum(elements[finite]), 1.0)
        rough = np.array([ROUGH.get(each.kind, TOLERANCE) for each in read.values()])
        allowed = rough * np.sqrt(np.maximum(squares, mean * elements))
        columns = np.stack([projections, np.sqrt(squares), allowed], axis=1).tolist()
    return dict(zip(read, columns, strict=True))
