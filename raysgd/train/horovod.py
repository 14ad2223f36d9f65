"""The names that Ray has in this module. Horovod itself is imported on the workers. Driver."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from raysgd.train.backends import HorovodConfig

__all__ = ["HorovodConfig"]


def __getattr__(name: str) -> Any:
    """Support `from raysgd.train.horovod import HorovodTrainer`, as in Ray. The trainer belongs to a higher layer."""
    if name == "HorovodTrainer":
        return getattr(import_module("raysgd.train"), name)
    raise AttributeError(f"module 'raysgd.train.horovod' has no attribute {name!r}")
