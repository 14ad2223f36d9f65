"""The names of `ray.train.callbacks.logging`. Driver."""

from __future__ import annotations

from raysgd.train.callbacks import JsonLoggerCallback, MLflowLoggerCallback, TBXLoggerCallback

__all__ = [
    "JsonLoggerCallback",
    "MLflowLoggerCallback",
    "TBXLoggerCallback",
]
