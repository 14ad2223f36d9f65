"""A checkpoint's file, as the driver names it to its workers: those that see the very same file read it themselves."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

__all__ = ["SeenFile", "UnseenError", "is_archive"]

TAIL = 1 << 20


class UnseenError(Exception):
    """A worker does not see the file that it was to read."""


def is_archive(file: Path) -> bool:
    """Is it in the zip format that torch writes? Its end lists the checksums of all that is in it."""
    if file.suffix == ".safetensors":
        return False  # torch takes a path of that name for another format
    try:
        with open(file, "rb") as opened:
            return opened.read(2) == b"PK"
    except OSError:
        return False  # whoever reads it will say what is wrong


@dataclass(frozen=True)
class SeenFile:
    """A path, and what tells its file from another one of that name on another machine: size, time, and its end."""

    path: str
    size: int
    changed_ns: int
    end: str

    @classmethod
    def of(cls, file: Path) -> SeenFile:
        with open(file, "rb") as opened:
            return cls._of(opened, str(file.absolute()))

    @classmethod
    def _of(cls, opened: BinaryIO, path: str) -> SeenFile:
        stat = os.fstat(opened.fileno())
        opened.seek(max(0, stat.st_size - TAIL))
        end = hashlib.sha256(opened.read()).hexdigest()
        return cls(path, stat.st_size, stat.st_mtime_ns, end)

    @property
    def here(self) -> bool:
        """Does this process see it?"""
        try:
            return SeenFile.of(Path(self.path)) == self
        except OSError:
            return False

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """To be read from its beginning; `UnseenError` if this process does not see it, or it is another one by now."""
        try:
            with open(self.path, "rb") as file:
                if SeenFile._of(file, self.path) != self:
                    raise UnseenError
                file.seek(0)
                yield file
        except OSError as error:
            raise UnseenError from error
