"""The names of `ray.train.base_trainer`. Driver."""

from __future__ import annotations

from raysgd.errors import TrainingFailedError
from raysgd.train.fit.trainer import DataParallelTrainer as BaseTrainer

__all__ = [
    "BaseTrainer",
    "TrainingFailedError",
]
