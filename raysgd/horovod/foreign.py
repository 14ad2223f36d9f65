"""All private names of Horovod that raysgd uses. Worker.

Checked with Horovod 0.28.1. `tests/package/test_foreign.py` calls every function here, and names
the first private name that a new version of Horovod no longer has.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

NEVER = 1 << 30  # an optimizer exchanges its gradients after this many backward passes


def basics() -> Any:
    """The class behind `hvd.init` of every framework."""
    return import_module("horovod.common.basics").HorovodBasics


def has_unsent_gradients(optimizer: Any) -> bool:
    """Whether gradients of the last backward passes wait for `optimizer.synchronize()`: on all
    ranks or on none."""
    return bool(optimizer._handles)


def stop_sending(optimizer: Any) -> None:
    """Make a DistributedOptimizer that was replaced send nothing. Its hooks exist as long as
    anything refers to the accumulators, such as an error's traceback."""
    delays = optimizer._allreduce_delay
    delays.update(dict.fromkeys(delays, NEVER))
    optimizer._grad_accs.clear()
    optimizer._handles.clear()
