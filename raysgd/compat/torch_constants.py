"""RaySGD's module of constants: those of `raysgd.constants`, and two limits that the environment can set. Both.

`NCCL_TIMEOUT_S` and `SGD_PLACEMENT_GROUP_TIMEOUT_S` are read from the environment each time `constants.NAME` is
evaluated; `from ... import NAME` keeps the value of that moment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysgd.config import seconds_from_environment
from raysgd.constants import *  # noqa: F403
from raysgd.constants import __all__ as _constants

if TYPE_CHECKING:
    NCCL_TIMEOUT_S: int
    SGD_PLACEMENT_GROUP_TIMEOUT_S: int

__all__ = ["NCCL_TIMEOUT_S", "SGD_PLACEMENT_GROUP_TIMEOUT_S"]
__all__ += _constants

_DEFAULT_SECONDS = {"NCCL_TIMEOUT_S": 1800, "SGD_PLACEMENT_GROUP_TIMEOUT_S": 100}


def __getattr__(name: str) -> int:
    if name not in _DEFAULT_SECONDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return seconds_from_environment(name, _DEFAULT_SECONDS[name])


def __dir__() -> list[str]:
    return sorted(__all__)
