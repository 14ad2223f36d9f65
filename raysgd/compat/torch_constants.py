"""Two limits of RaySGD that the environment can set. Both.

They are read from the environment each time `constants.NAME` is evaluated; `from ... import NAME`
keeps the value of that moment.
"""

from __future__ import annotations

from raysgd.config import seconds_from_environment

DEFAULT_SECONDS = {"NCCL_TIMEOUT_S": 1800, "SGD_PLACEMENT_GROUP_TIMEOUT_S": 100}


def __getattr__(name: str) -> int:
    if name not in DEFAULT_SECONDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return seconds_from_environment(name, DEFAULT_SECONDS[name])
