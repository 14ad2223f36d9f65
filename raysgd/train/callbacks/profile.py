"""The names of `ray.train.callbacks.profile`. Driver."""

from __future__ import annotations

from raysgd.train.callbacks import TorchTensorboardProfilerCallback

__all__ = [
    "TorchTensorboardProfilerCallback",
]
