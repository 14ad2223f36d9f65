"""The names that Ray has in this module. Horovod itself is imported on the workers. Driver."""

from __future__ import annotations

from raysgd.core.lazy import lazy_names
from raysgd.train.backends import HorovodConfig

__all__ = ["HorovodConfig"]

# As in Ray. The module of this name imports Ray, which the workers do not need.
__path__: list[str] = []  # lets Python look for `raysgd.train.horovod.config`, which raysgd.compat provides
__getattr__ = lazy_names("raysgd.train.horovod", {"HorovodTrainer": "raysgd.train.fit.frameworks"})[0]
