"""A checkpoint's file: verified by the driver, which then names it to its workers; those that see the very same file
read it themselves."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from raysgd.errors import CheckpointError
from raysgd.storage.digest import verify
from raysgd.torch.checkpoint.zip_scan import check_content

__all__ = ["SeenFile", "UnseenError", "is_archive", "readable", "verified", "verified_file"]

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


@contextmanager
def readable() -> Iterator[None]:
    """Raise what the system says of a file that cannot be read as a CheckpointError."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint at {os.path.abspath(str(error.filename))}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"it cannot be read ({type(error).__name__}: {error})") from error


def verified(source: Any, *, trusted: bool) -> bool:
    """Compare the digest of bytes or of an open file, then look through the content: neither is given to `torch.load`
    before. Return False when there is no digest."""
    sealed = verify(source)
    check_content(source, trusted=trusted)
    return sealed


def verified_file(path: Path, *, trusted: bool) -> tuple[SeenFile, bool]:
    """Return the file, and whether it has a digest, which is the right one."""
    with readable():
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CheckpointError("it is not a regular file, but a device or a pipe")
        with open(path, "rb") as opened:
            seen = SeenFile._of(opened, str(path.absolute()))
            return seen, verified(opened, trusted=trusted)


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
