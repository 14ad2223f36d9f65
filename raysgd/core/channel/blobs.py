"""Bytes that are sent outside of pickles. Both."""

from __future__ import annotations

import pickle
from typing import Any


class Blob:
    """Bytes that are sent outside the pickle stream (as a `PickleBuffer`), so that a large state is
    not copied."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __reduce_ex__(self, protocol: Any) -> Any:
        if int(protocol) >= 5:
            return type(self), (pickle.PickleBuffer(self.data),)
        return type(self), (bytes(self.data),)

    def __len__(self) -> int:
        return memoryview(self.data).nbytes


class Blobs(Blob):
    """Several of them, which arrive in memory of their own."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self), ([pickle.PickleBuffer(each) for each in self.data],)

    def copy(self) -> Blobs:
        return type(self)([bytearray(each) for each in self.data])
