"""Bytes on a journey between the driver and its workers."""

from __future__ import annotations

import pickle
from typing import Any

__all__ = ["Blob", "PickledObject", "unpickled"]


class Blob:
    """Bytes that travel beside the pickle stream instead of inside it, so that a big state is copied once.

    `ref` is the group's own note of where it has put them; it does not travel.
    """

    def __init__(self, data: Any) -> None:
        self.data = data
        self.ref: Any = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        if int(protocol) >= 5:
            return type(self), (pickle.PickleBuffer(self.data),)
        return type(self), (bytes(self.data),)

    def __len__(self) -> int:
        return memoryview(self.data).nbytes


class PickledObject(Blob):
    """A user's object (an operator class, a function), pickled once by value for all workers."""


def unpickled(value: Any) -> Any:
    """The object inside, where there is one."""
    return pickle.loads(value.data) if isinstance(value, PickledObject) else value
