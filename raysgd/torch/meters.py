"""Averages of numbers on a device, which are kept and read together. Worker."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from raysgd.constants import WEIGHT
from raysgd.core.measures.average_meters import AverageMeterCollection


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
