"""The names of `ray.train.backends.backend`. Driver."""

from __future__ import annotations

from raysgd.train.backends import Backend, BackendConfig
from raysgd.train.executor import BackendExecutor

__all__ = [
    "Backend",
    "BackendConfig",
    "BackendExecutor",
]
