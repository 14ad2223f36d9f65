"""Bytes that lie in memory, read as a file is."""

from __future__ import annotations

import io
import os
from typing import IO, Any, cast

__all__ = ["Bytes", "opened"]


def opened(data: Any) -> IO[bytes]:
    """Bytes that lie in memory, as a file to read from."""
    return cast(IO[bytes], Bytes(data))


class Bytes(io.RawIOBase):
    """A file to read from; unlike `BytesIO` it makes no copy of what it is given."""

    def __init__(self, data: Any) -> None:
        self._data, self._at = memoryview(data).cast("B"), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._data)}[whence]
        if at < 0:
            raise ValueError(f"there is nothing before the beginning: {at}")
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        piece = self._data[self._at : self._at + len(buffer)]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)
