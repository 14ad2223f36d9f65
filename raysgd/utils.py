"""The names that `ray.util.sgd.utils` had, for code that was written for it. Nothing new belongs here."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from raysgd.constants import BATCH_COUNT, BATCH_SIZE, NUM_SAMPLES
from raysgd.core.meters import AverageMeter, AverageMeterCollection
from raysgd.core.timers import TimerCollection, TimerStat

if TYPE_CHECKING:
    from raysgd.workers.legacy import check_for_failure

__all__ = [
    "BATCH_COUNT",
    "BATCH_SIZE",
    "NUM_SAMPLES",
    "AverageMeter",
    "AverageMeterCollection",
    "TimerCollection",
    "TimerStat",
    "check_for_failure",
    "find_free_port",
    "override",
]

_Method = TypeVar("_Method")


def find_free_port() -> int:
    """A TCP port that was free a moment ago. Another may take it before you do; binding port 0 is safe."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port


def override(cls: type) -> Callable[[_Method], _Method]:
    """Mark a method as overriding one of `cls`; AssertionError at its definition if `cls` has none such."""

    def check(method: _Method) -> _Method:
        name: Any = getattr(getattr(method, "fget", method), "__name__", None)  # a property names its getter
        if not isinstance(name, str) or not hasattr(cls, name):
            raise AssertionError(
                f"{name or method!r} overrides nothing: {cls.__name__} has no such member. "
                "Correct the name, or take the decorator away."
            )
        return method

    return check


def __getattr__(name: str) -> Any:
    if name == "check_for_failure":  # late: only this name needs Ray
        from raysgd.workers.legacy import check_for_failure

        return check_for_failure
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
