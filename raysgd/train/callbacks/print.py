"""The names of `ray.train.callbacks.print`. Driver."""

from __future__ import annotations

from raysgd.train.callbacks import PrintCallback

__all__ = [
    "PrintCallback",
]
