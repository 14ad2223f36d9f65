"""The names of `ray.train.backends.torch`. Driver."""

from __future__ import annotations

from raysgd.train.backends import TorchConfig

__all__ = [
    "TorchConfig",
]
