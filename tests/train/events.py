"""What TensorBoard's files have."""

from pathlib import Path
from typing import Any

import torch.utils.tensorboard  # noqa: F401, draws random numbers when it is imported first
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.util import tensor_util


def points_of(folder: Path) -> list[Any]:
    """Read all points that TensorBoard has, also those that were written twice."""
    files = sorted(folder.rglob("events.out.*"))
    events = [each for file in files for each in EventFileLoader(str(file)).Load()]
    points = [
        (each.step, value.tag, tensor_util.make_ndarray(value.tensor))
        for each in events
        for value in each.summary.value
    ]
    return sorted((step, tag, value.item()) for step, tag, value in points if value.dtype.kind == "f")
