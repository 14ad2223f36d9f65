"""The witness as a group of plain SGD in the user's optimizer: so it proves the path of the user's own parameters.

class Mine(Witnessing, TrainingOperator):
    def setup(self, config):
        self.witness = Witness(rows)      register it as a model, and give its parameters a group of plain SGD
"""

from typing import Any

import torch
from torch import nn

from raysgd.torch.witness import Witness
from tests.peek import rows_now

__all__ = ["Witness", "Witnessing", "entered", "witness_group"]


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
        super().backward(loss + self.witness(torch.tensor(rows_now(self))), *given, **named)  # type: ignore[misc]
