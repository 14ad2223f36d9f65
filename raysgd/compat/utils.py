"""Functions of `ray.util.sgd.utils` and `ray.train.utils`. Both."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from raysgd.core.channel.network import own_address

logger = logging.getLogger(__name__)
Method = TypeVar("Method")


def find_free_port() -> int:
    """Find a port that was free a moment ago; another process may take it before you do."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port


def override(cls: type) -> Callable[[Method], Method]:
    """Mark a method as overriding one of `cls`; raise AssertionError if that has none."""

    def check(method: Method) -> Method:
        name: Any = getattr(getattr(method, "fget", method), "__name__", None)  # a property names its getter
        if not isinstance(name, str) or not hasattr(cls, name):
            raise AssertionError(
                f"{name or method!r} overrides nothing: {cls.__name__} has no such member. "
                "Correct the name, or remove the decorator."
            )
        return method

    return check


def check_for_failure(remote_values: Iterable[Any], *, timeout_s: float | None = None) -> bool:
    """Wait for calls on Ray actors. Return True when all have ended, False as soon as an actor has
    failed.

    Raise the error that a call raised. Raise TimeoutError if no call ends within `timeout_s` of the
    one before; without `timeout_s`, wait without a limit.
    """
    import ray  # only this function needs it
    from ray.exceptions import RayActorError

    waiting = list(dict.fromkeys(remote_values))  # ray.wait refuses a reference that is given twice
    while waiting:
        ended, waiting = ray.wait(waiting, num_returns=1, timeout=timeout_s)
        if not ended:
            raise TimeoutError(
                f"no call ended within {timeout_s} s; {len(waiting)} are still running. "
                "Pass a larger timeout_s, or stop the workers."
            )
        try:
            ray.get(ended)
        except RayActorError as error:
            logger.warning("an actor failed: %s", error)
            return False
    return True


def construct_path(path: Path, parent_path: Path) -> Path:
    """Make a path absolute; a relative one is below `parent_path`."""
    return parent_path.expanduser().joinpath(path.expanduser()).resolve()


def construct_train_func(train_func: Callable[..., Any], config: Mapping[str, Any] | None) -> Callable[[], Any]:
    """Make a function without arguments from a training function and its config."""
    from raysgd.train.run.job import check_function

    function, arguments = check_function(train_func, config)
    return lambda: function(*arguments)


def get_address_and_port() -> tuple[str, int]:
    """Find this machine's address, and a port that was free a moment ago."""
    return own_address(), find_free_port()


def update_env_vars(env_vars: Mapping[str, Any]) -> None:
    """Set environment variables, whose values become strings."""
    os.environ.update({name: str(value) for name, value in env_vars.items()})
