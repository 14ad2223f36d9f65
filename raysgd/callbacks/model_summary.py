"""Print the models of an operator once: parameters by layer, how many are trained, bytes. Both."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple, TextIO

from raysgd.callbacks.monitors import ForOperators

HEAD = ("layer", "type", "parameters", "trainable", "bytes")


class LayerSize(NamedTuple):
    """The parameters that a layer has itself, without those of the layers in it."""

    name: str
    kind: str
    parameters: int
    trainable: int
    bytes: int


class ModelSummary(ForOperators):
    """Prints the layers of the registered models when the workers have started, to `file`, by default sys.stdout. `rows` has
    them for each model."""

    instead = "print(raysgd.callbacks.summary_of(model)) there, on rank 0"

    def __init__(self, *, file: TextIO | None = None) -> None:
        self._file = file
        self.asks = _models_of
        self.rows: list[list[LayerSize]] = []

    def on_answer(self, answer: list[list[LayerSize]]) -> None:
        self.rows = answer
        for rows in answer:
            print(_table(rows), file=self._file or sys.stdout, flush=True)


def summary_of(model: Any) -> str:
    """Return the layers of `model`, one of torch or Keras, as a table."""
    return _table(list(_layers(model)))


def _models_of(operator: Any) -> list[list[LayerSize]]:
    return [list(_layers(model)) for model in operator._parts.models]


def _layers(model: Any) -> Iterator[LayerSize]:
    """Yield the layers that have parameters. Each parameter counts once, where it is first."""
    if not hasattr(model, "named_modules"):  # of Keras
        for layer in model.layers:
            weights = [(weight.trainable, weight.numpy()) for weight in layer.weights]
            trained = sum(value.size for trainable, value in weights if trainable)
            total, size = sum(value.size for _, value in weights), sum(value.nbytes for _, value in weights)
            yield LayerSize(layer.name, type(layer).__name__, total, trained, size)
        return
    seen: set[int] = set()
    for name, module in model.named_modules():
        own = [each for each in module.parameters(recurse=False) if id(each) not in seen]
        seen |= {id(each) for each in own}
        if own:
            trained = sum(each.numel() for each in own if each.requires_grad)
            total, size = sum(each.numel() for each in own), sum(each.numel() * each.element_size() for each in own)
            yield LayerSize(name or "(model)", type(module).__name__, total, trained, size)


def _table(rows: list[LayerSize]) -> str:
    sums = (sum(column) for column in list(zip(*rows, strict=True))[2:]) if rows else (0, 0, 0)
    every = [
        HEAD,
        *((*row[:2], *(f"{number:,}" for number in row[2:])) for row in [*rows, LayerSize("total", "", *sums)]),
    ]
    widths = [max(len(row[place]) for row in every) for place in range(len(HEAD))]
    lines = (
        [
            f"{cell:<{width}}" if place < 2 else f"{cell:>{width}}"
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in every
    )
    return "\n".join("  ".join(line).rstrip() for line in lines)
