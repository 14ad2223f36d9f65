"""What Ray has under this name. Horovod itself is loaded on the workers."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from raysgd.train.backends import HorovodConfig

__all__ = ["HorovodConfig"]


def __getattr__(name: str) -> Any:
    """`from raysgd.train.horovod import HorovodTrainer`. The trainer stands above what functions call."""
    if name == "HorovodTrainer":
        return getattr(import_module("raysgd.train"), name)
    raise AttributeError(f"module 'raysgd.train.horovod' has no attribute {name!r}")
