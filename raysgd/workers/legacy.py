"""A function that scripts for RaySGD call on Ray references. The engine does not use it. Driver."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import ray
from ray.exceptions import RayActorError

logger = logging.getLogger(__name__)


def check_for_failure(remote_values: Iterable[Any], *, timeout_s: float | None = None) -> bool:
    """Wait for calls on actors. Return True when all have ended, False as soon as an actor has failed.

    Raise the error that a call raised. Raise TimeoutError if no call ends within `timeout_s` of the one before; without
    `timeout_s`, wait without a limit.
    """
    waiting = list(dict.fromkeys(remote_values))  # ray.wait refuses a reference that is given twice
    while waiting:
        ended, waiting = ray.wait(waiting, num_returns=1, timeout=timeout_s)
        if not ended:
            raise TimeoutError(
                f"no call ended within {timeout_s} s; {len(waiting)} are still running. "
                "Give a larger timeout_s, or stop the workers."
            )
        try:
            ray.get(ended)
        except RayActorError as error:
            logger.warning("A worker died: %s", error)
            return False
    return True
