"""The names of `ray.train.data_parallel_trainer`. Driver."""

from __future__ import annotations

from raysgd.train.fit.trainer import DataParallelTrainer

__all__ = [
    "DataParallelTrainer",
]
