"""Averages of numbers on a device, which are read together. Worker."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from raysgd.core.average_meters import AverageMeterCollection


class DeviceMeters(AverageMeterCollection):
    """Reads the numbers that wait on a device with one copy for each type, instead of a wait for
    each number."""

    def _read(self, waiting: list[Any]) -> list[float]:
        alike: defaultdict[Any, list[int]] = defaultdict(list)
        for place, each in enumerate(waiting):
            # Tensors of other classes may be on several devices.
            alike[(each.device, each.dtype) if type(each) is torch.Tensor else place].append(place)
        found: list[Any] = [None] * len(waiting)
        for places in alike.values():
            some = [waiting[place] for place in places]
            values = torch.stack([each.reshape(()) for each in some]).tolist() if some[1:] else [some[0].item()]
            for place, value in zip(places, values, strict=True):
                found[place] = value
        return found
