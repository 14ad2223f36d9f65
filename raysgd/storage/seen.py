"""Verify a checkpoint's file on the driver; workers that see it read it themselves. Both."""

from __future__ import annotations

import hashlib
import io
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from raysgd.errors import CheckpointError, ConfigError
from raysgd.storage import checksums

TAIL = 1 << 20


class UnseenError(Exception):
    """A worker does not see the file that it should read."""


@contextmanager
def readable() -> Iterator[None]:
    """Translate the system's error for a file that cannot be read into a CheckpointError."""
    try:
        yield
    except ConfigError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint at {os.path.abspath(str(error.filename))}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"it cannot be read ({type(error).__name__}: {error})") from error


def kept_open(path: Path) -> BinaryIO:
    """Open a file, which is closed when nothing refers to it: until then, it can be read, also if
    its name is given to another one."""
    with readable():
        descriptor = os.open(path, os.O_RDONLY)
    file = open(descriptor, "rb", closefd=False)  # noqa: SIM115 - the caller reads it
    weakref.finalize(file, os.close, descriptor)
    return file


def verified_file(file: BinaryIO, path: Path) -> tuple[SeenFile | None, bool]:
    """Verify an open file. Return it if workers can read it themselves, and whether it has
    checksums. They can read torch's zip format, whose end contains the checksums of all its
    content."""
    with readable():
        archive = file.read(2) == b"PK" and path.suffix != ".safetensors"  # torch expects another format in those
        return SeenFile.of(file, path) if archive else None, checksums.verify(file)


@dataclass(frozen=True)
class SeenFile:
    """A path with the size, the time and a digest of the end of its file. Another machine's file
    with that path differs in one of them."""

    path: str
    size: int
    changed_ns: int
    end: str

    @classmethod
    def of(cls, file: BinaryIO, path: Path) -> SeenFile:
        info = os.fstat(file.fileno())
        file.seek(max(0, info.st_size - TAIL))
        end = hashlib.sha256(file.read()).hexdigest()
        return cls(str(path.absolute()), info.st_size, info.st_mtime_ns, end)

    @contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """Open the file. Raise `UnseenError` if it is not there, or has changed."""
        try:
            with open(self.path, "rb") as file:
                if SeenFile.of(file, Path(self.path)) != self:
                    raise UnseenError
                file.seek(0)
                yield file
        except OSError as error:
            raise UnseenError from error


def opened(data: Any) -> IO[bytes]:
    """Open bytes in memory as a file to read from."""
    return cast(IO[bytes], Bytes(data))


class Bytes(io.RawIOBase):
    """A file to read from that, unlike `BytesIO`, does not copy the bytes it is given."""

    def __init__(self, data: Any) -> None:
        self._data, self._at = memoryview(data).cast("B"), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._data)}[whence]
        if at < 0:
            raise ValueError(f"cannot seek to {at}, before the beginning")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        piece = self._data[self._at : self._at + len(buffer)]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)
