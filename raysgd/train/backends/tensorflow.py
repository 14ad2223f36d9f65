"""The names of `ray.train.backends.tensorflow`. Driver."""

from __future__ import annotations

from raysgd.train.backends import TensorflowConfig

__all__ = [
    "TensorflowConfig",
]
