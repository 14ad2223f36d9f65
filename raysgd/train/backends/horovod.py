"""The names of `ray.train.backends.horovod`. Driver."""

from __future__ import annotations

from raysgd.train.backends import HorovodConfig

__all__ = [
    "HorovodConfig",
]
