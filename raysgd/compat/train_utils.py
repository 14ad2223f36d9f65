"""The names of `ray.train.utils`. Both."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from raysgd.compat.utils import check_for_failure, find_free_port
from raysgd.core.network import own_address
from raysgd.train.run import check_function

__all__ = [
    "check_for_failure",
    "construct_path",
    "construct_train_func",
    "get_address_and_port",
    "update_env_vars",
]


def construct_path(path: Path, parent_path: Path) -> Path:
    """Return an absolute path, and a relative one below `parent_path`. "~" is the user's home folder."""
    return parent_path.expanduser().joinpath(path.expanduser()).resolve()


def construct_train_func(train_func: Callable[..., Any], config: Mapping[str, Any] | None) -> Callable[[], Any]:
    """Return a training function with its config, as a function without arguments."""
    function, arguments = check_function(train_func, config)
    return lambda: function(*arguments)


def get_address_and_port() -> tuple[str, int]:
    """Return this machine's address, and a port that was free a moment ago."""
    return own_address(), find_free_port()


def update_env_vars(env_vars: Mapping[str, Any]) -> None:
    """Set environment variables, whose values become strings."""
    os.environ.update({name: str(value) for name, value in env_vars.items()})
