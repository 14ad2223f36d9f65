"""Change the leaves of nested dictionaries, lists and tuples. Both."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any


def mapped(change: Callable[..., Any], value: Any, *path: Any) -> Any:
    """Make the same containers with `change(leaf, *path)` in place of each leaf. `path` has the
    keys and places that lead to it.

    The attributes of an OrderedDict stay: torch keeps the versions of modules in one of a model's
    state. A Counter stays one, which some schedulers of torch have in theirs."""
    if isinstance(value, dict):
        result: dict[Any, Any] = next((kind for kind in (OrderedDict, Counter) if isinstance(value, kind)), dict)()
        for key, each in value.items():
            result[key] = mapped(change, each, *path, key)
        if isinstance(value, OrderedDict):
            vars(result).update(vars(value))
        return result
    if isinstance(value, (list, tuple)):
        items = [mapped(change, each, *path, place) for place, each in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return change(value, *path)


def leaves(value: Any) -> Iterator[Any]:
    """Iterate over what `mapped` would change. No container is made again."""
    if isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from leaves(each)
    else:
        yield value
