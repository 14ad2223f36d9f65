"""Weights of a given size, for what is saved rather than trained."""

import torch
from torch import nn

PIECE_MB = 16


class Weights(nn.Module):
    """So many MB of parameters, in pieces as a transformer's are."""

    def __init__(self, mb: int) -> None:
        super().__init__()
        sizes = [min(PIECE_MB, mb - start) for start in range(0, mb, PIECE_MB)]
        self.pieces = nn.ParameterList(nn.Parameter(torch.randn(size * 250, 1000)) for size in sizes)
