"""Wrap bytes and pickled objects that are sent between the driver and its workers. Both."""

from __future__ import annotations

import pickle
from typing import Any

SMALL = 1 << 16  # bytes that are not worth a place in Ray's object store


class Blob:
    """Bytes that are sent outside the pickle stream (as a `PickleBuffer`), so that a large state is
    copied only once.

    `ref` is where the group has put them in Ray's object store. It is not sent.
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
    """A user's object as bytes: an operator class or a function, pickled once for all workers, or
    what a call returned."""


def unpickled(value: Any) -> Any:
    """Return the object in a `PickledObject`, and any other value as it is."""
    return pickle.loads(value.data) if isinstance(value, PickledObject) else value
