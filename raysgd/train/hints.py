"""Settings that others have and these have not: an error that says which there are, and what to do instead."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from raysgd.errors import ConfigError

__all__ = ["hints"]

T = TypeVar("T")


def hints(**instead: str) -> Callable[[type[T]], type[T]]:
    """For a class of settings: an argument that it does not take is a ConfigError. `instead` says, for names that are known
    from elsewhere, what to do."""

    def wrapped(cls: type[T]) -> type[T]:
        plain: Callable[..., None] = cls.__init__
        taken = list(inspect.signature(cls).parameters)

        @functools.wraps(plain)
        def init(self: T, *values: Any, **named: Any) -> None:
            for name in named:
                if name not in taken:
                    more = f": {instead[name]}" if name in instead else ""
                    raise ConfigError(f"{cls.__name__} has no setting {name!r}{more}; it takes {', '.join(taken)}")
            plain(self, *values, **named)

        cls.__init__ = init  # type: ignore[method-assign, assignment]
        return cls

    return wrapped
