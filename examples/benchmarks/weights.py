"""Weights of a given size, and rows for them: what is copied, saved and sent, rather than what is computed."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

PIECE_MB = 16
FEATURES, CLASSES = 1000, 10


class Weights(nn.Module):
    """So many MB of parameters, in pieces as a transformer's are. Each takes part in the output."""

    def __init__(self, mb: int) -> None:
        super().__init__()
        sizes = [min(PIECE_MB, mb - start) for start in range(0, mb, PIECE_MB)]
        self.pieces = nn.ParameterList(nn.Parameter(torch.randn(size * 250, FEATURES)) for size in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = [nn.functional.linear(x, piece).reshape(len(x), CLASSES, -1).mean(2) for piece in self.pieces]
        return torch.stack(outputs).mean(0)


class Rows(Dataset[Any]):
    """Rows of noise, each made when it is read."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.randn(FEATURES), index % CLASSES


def optimizer_for(model: nn.Module, name: str) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters()) if name == "Adam" else torch.optim.SGD(model.parameters(), lr=0.01)
