"""What older training code called on Ray's references itself. The engine does not use it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import ray
from ray.exceptions import RayActorError

logger = logging.getLogger(__name__)


def check_for_failure(remote_values: Iterable[Any], *, timeout_s: float | None = None) -> bool:
    """Wait for calls on actors: True when all have ended, False as soon as an actor is found dead.

    An error that a call itself raised reaches the caller as it is. Without `timeout_s` an actor that hangs is
    waited for; with it, TimeoutError tells of each call that took longer to end after the one before.
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
