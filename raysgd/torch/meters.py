"""Averages of numbers on a device, which are kept and read together, and the accuracy of a default
validation. Worker."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from raysgd.constants import WEIGHT
from raysgd.core.measures.average_meters import AverageMeterCollection

# From which output on the class is 1, by the name of a loss of two classes.
THRESHOLDS = {
    "BCEWithLogitsLoss": 0.0,
    "binary_cross_entropy_with_logits": 0.0,
    "BCELoss": 0.5,
    "binary_cross_entropy": 0.5,
}
OF_CLASSES = ("CrossEntropyLoss", "cross_entropy")


class DeviceMeters(AverageMeterCollection):
    """Keeps the numbers of a step on their device with one launch for each type, and reads those
    that wait with one copy for each type."""

    def update(self, metrics: Any, n: float = 1) -> None:
        if type(metrics) is not dict or type(n) is not int or n < 1:
            return super().update(metrics, n)
        rest: dict[str, Any] = {}
        alike: defaultdict[Any, dict[str, torch.Tensor]] = defaultdict(dict)
        for name, value in metrics.items():
            if name in self._meters and type(value) is torch.Tensor and not value.is_cpu and value.numel() == 1:
                alike[value.device, value.dtype][name] = value
            else:
                rest[name] = value
        super().update(rest, n)
        for numbers in alike.values():  # copied, because the step may write to them later
            some = [each.detach().reshape(()) for each in numbers.values()]
            copies = torch.stack(some).unbind() if some[1:] else [some[0].clone()]
            for number, (name, value) in zip(copies, numbers.items(), strict=True):
                weight = getattr(value, WEIGHT, n)
                if (type(weight) is torch.Tensor or weight) and self._meters[name]._add(number, weight):
                    self._settle()
        return None

    def _read(self, waiting: list[Any]) -> list[float]:
        alike: defaultdict[Any, list[int]] = defaultdict(list)
        for place, each in enumerate(waiting):
            # Tensors of other classes may be on several devices.
            alike[(each.device, each.dtype) if type(each) is torch.Tensor else place].append(place)
        result: list[Any] = [None] * len(waiting)
        for places in alike.values():
            some = [waiting[place] for place in places]
            values = torch.stack([each.reshape(()) for each in some]).tolist() if some[1:] else [some[0].item()]
            for place, value in zip(places, values, strict=True):
                result[place] = value
        return result


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
