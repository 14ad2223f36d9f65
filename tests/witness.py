"""A parameter with one number for each sample, whose gradient is the sample's weight in the step: so the weights themselves say which
samples entered, how often, and with which weight.

class Watched(Witnessing, TrainingOperator):
    def setup(self, config):
        self.witness = Witness(rows)      register it as a model, and give its parameters a group of plain SGD
"""

from typing import Any

import torch
from torch import nn

from tests.peek import rows_now

__all__ = ["Witness", "Witnessing", "entered", "witness_group"]


class Witness(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.entered = nn.Parameter(torch.zeros(rows, dtype=torch.float64))

    def forward(self, rows: list[int], parts: Any = None) -> torch.Tensor:
        """Return 0, whose gradient at each of these rows is its part of the batch: by default, an equal one."""
        found = self.entered[rows]
        given = torch.full((len(rows),), 1 / len(rows), dtype=found.dtype) if parts is None else parts
        return ((found - found.detach()) * given.to(found)).sum()


def witness_group(witness: nn.Module) -> dict[str, Any]:
    """Return the parameter group of an optimizer of plain SGD, in which the witness adds up weights."""
    return {"params": list(witness.parameters()), "lr": -1.0, "momentum": 0.0}


def entered(operator: Any) -> torch.Tensor:
    """Return the sum of the weights with which each sample has entered."""
    found: torch.Tensor = operator.unwrapped(operator.witness).entered.detach().clone()
    return found


class Witnessing:
    """A base, before the operator's, that adds the witness to each loss."""

    witness: Any

    def backward(self, loss: torch.Tensor, *given: Any, **named: Any) -> None:
        super().backward(loss + self.witness(rows_now(self)), *given, **named)  # type: ignore[misc]
