"""The names that Ray has in this module. Horovod itself is imported on the workers. Driver."""

from __future__ import annotations

from typing import Any

from raysgd.train.backends import HorovodConfig

__all__ = ["HorovodConfig"]


def __getattr__(name: str) -> Any:
    """Support `from raysgd.train.horovod import HorovodTrainer`, as in Ray, without importing Ray on the workers."""
    if name == "HorovodTrainer":
        from raysgd.train.frameworks import HorovodTrainer

        return HorovodTrainer
    raise AttributeError(f"module 'raysgd.train.horovod' has no attribute {name!r}")
