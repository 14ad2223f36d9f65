"""Classes of a user that note what raysgd's own code writes to their objects: attributes, classes, dictionaries of attributes.

model = recorded(nn.Linear)(2, 1)
...
assert touched() == []

What torch, Lightning or the user's code writes is not noted, also if raysgd calls it. Copies of these objects are not watched.
"""

import sys
from pathlib import Path
from types import GetSetDescriptorType
from typing import Any

import raysgd

__all__ = ["forget", "recorded", "touched"]

LIBRARY = str(Path(raysgd.__file__).parent)
_notes: list[tuple[str, str, str]] = []


def touched() -> list[tuple[str, str, str]]:
    """Return what was noted: a class, what was written to its object, and the line that wrote it."""
    return list(_notes)


def forget() -> None:
    _notes.clear()


def recorded(kind: type) -> Any:
    """Return a subclass that notes what raysgd writes to its objects."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "_watched": kind}
    return type(kind.__name__, (Notes, kind), names)


def _by_raysgd() -> str:
    """Return the line of raysgd's that the caller of the calling method is in, "" if it is in other code."""
    caller = sys._getframe(2)
    ours = caller.f_code.co_filename.startswith(LIBRARY)
    return f"{caller.f_code.co_filename}:{caller.f_lineno}" if ours else ""


def _attributes(thing: Any) -> dict[str, Any]:
    """Return the attributes of an object, without asking its class."""
    found = (each.__dict__.get("__dict__") for each in type(thing).__mro__)
    own: dict[str, Any] = next(each for each in found if isinstance(each, GetSetDescriptorType)).__get__(thing)
    return own


class Attributes(dict[str, Any]):
    """The attributes of an object, as raysgd gets them. It may read them."""

    def __init__(self, thing: Any, line: str) -> None:
        super().__init__(_attributes(thing))
        self._thing, self._line = thing, line

    def __setitem__(self, name: str, value: Any) -> None:
        self.update({name: value})

    def update(self, *given: Any, **named: Any) -> None:
        _notes.append((type(self._thing).__name__, "__dict__", self._line))
        _attributes(self._thing).update(*given, **named)

    def pop(self, *given: Any) -> Any:
        _notes.append((type(self._thing).__name__, "__dict__", self._line))
        return _attributes(self._thing).pop(*given)


class Notes:
    _watched: type

    def __setattr__(self, name: str, value: Any) -> None:
        if line := _by_raysgd():
            _notes.append((type(self).__name__, name, line))
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if line := _by_raysgd():
            _notes.append((type(self).__name__, name, line))
        super().__delattr__(name)

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        line = _by_raysgd()
        return Attributes(self, line) if line else _attributes(self)

    def __copy__(self) -> Any:
        copied: Any = object.__new__(self._watched)
        _attributes(copied).update(_attributes(self))
        return copied
