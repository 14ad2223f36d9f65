"""Packages that only a callback needs: imported when it is used, with an error that says what to install."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["needs"]


def needs(module: str, *, who: str, extra: str = "callbacks") -> Any:
    """The module; or an ImportError that names who wants it, and the extra that has it."""
    try:
        return import_module(module)
    except ImportError as error:
        if (error.name or "").partition(".")[0] != module.partition(".")[0]:
            raise
        raise ImportError(f"{who} needs {module.partition('.')[0]}: pip install 'raysgd[{extra}]'") from error
