"""The names of `ray.train.callbacks.callback`. Driver."""

from __future__ import annotations

from raysgd.train.callbacks import TrainingCallback

__all__ = [
    "TrainingCallback",
]
