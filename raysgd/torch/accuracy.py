"""The accuracy that a default validation reports. Worker."""

from __future__ import annotations

from typing import Any

import torch

from raysgd.constants import WEIGHT

# From which output on the class is 1, by the name of a loss of two classes.
THRESHOLDS = {
    "BCEWithLogitsLoss": 0.0,
    "binary_cross_entropy_with_logits": 0.0,
    "BCELoss": 0.5,
    "binary_cross_entropy": 0.5,
}
OF_CLASSES = ("CrossEntropyLoss", "cross_entropy")


def accuracy(output: torch.Tensor, target: torch.Tensor, criterion: Any) -> Any:
    """The fraction of right classes, weighed by how many count if the criterion ignores a class. 0
    where this has no meaning, as in a regression."""
    if not isinstance(target, torch.Tensor):
        return 0.0
    name = getattr(criterion, "__name__", type(criterion).__name__)
    if output.dim() > 1 and target.shape == output.shape[:1] + output.shape[2:]:
        right, ignored = output.argmax(dim=1) == target, getattr(criterion, "ignore_index", None)
        if ignored is None:
            return right.float().mean()
        counts = target != ignored
        fraction = (right & counts).sum() / counts.sum()
        setattr(fraction, WEIGHT, counts.sum())
        return fraction
    if output.shape != target.shape:
        return 0.0
    if name in THRESHOLDS:
        return ((output > THRESHOLDS[name]) == (target > 0.5)).float().mean()
    if name in OF_CLASSES and output.dim() > 1:  # probabilities as targets
        return (output.argmax(dim=1) == target.argmax(dim=1)).float().mean()
    return 0.0
