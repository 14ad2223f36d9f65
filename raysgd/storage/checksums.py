"""Verify the CRC-32 checksums that a zip archive has of its members, before anything is read from
it. Compute digests of files. Both.

`torch.save` and `zipfile` write a checksum for every member, but `torch.load` does not compare it.
Checksums and digests detect damage. They are not a signature: anyone who can change the file can
change them. Several threads compute the checksums of a large file, each those of whole members.
"""

from __future__ import annotations

import hashlib
import io
import os
import zipfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from raysgd.errors import CheckpointError

try:
    from zlib_ng.zlib_ng import crc32  # uses instructions that Python's zlib rarely uses
except ImportError:
    from zlib import crc32

THREADS = min(4, os.cpu_count() or 1)
PIECE = 1 << 20  # what a thread holds in memory
ALONE = 4 << 20  # a smaller file is verified before another thread has started
ZIP = b"PK"
DIRECTORY = 0x10  # an attribute of a member
HEADER_BYTES, LENGTHS_AT = 30, 26  # of a member's header, which its name and an extra field follow


class ByteSource:
    """Reads any part of bytes, or of an open file without changing its position."""

    def __init__(self, source: Any) -> None:
        self._descriptor = source.fileno() if hasattr(source, "fileno") else None
        self._view = memoryview(b"" if self._descriptor is not None else source).cast("B")
        self.size = len(self._view) if self._descriptor is None else os.fstat(self._descriptor).st_size

    def view(self, start: int, length: int, buffer: bytearray | None = None) -> memoryview:
        """The bytes that exist in this range, without copying those in memory. Those of a file are
        read into the buffer, if there is one: memory that is used again takes less time than new
        memory."""
        if self._descriptor is None:
            return self._view[start : start + length]
        length = max(min(length, self.size - start), 0)
        view = memoryview(bytearray(length) if buffer is None else buffer)[:length]
        done = 0
        while done < length:
            count = os.preadv(self._descriptor, [view[done:]], start + done)
            done += count
            if not count:
                raise CheckpointError("the file became shorter while it was being read")
        return view

    def read(self, start: int, length: int) -> bytes:
        """Copy the bytes that exist in this range."""
        return bytes(self.view(start, length))


def verify(source: Any) -> bool:
    """Verify the checksums in bytes or in an open file. Return False if there are none: if it is
    not a zip archive (RaySGD and torch before 1.6 wrote others), or one that was written with
    `set_crc32_options(False)`. Raise CheckpointError if a member is damaged, or the archive is."""
    data = ByteSource(source)
    if data.read(0, len(ZIP)) != ZIP:
        return False
    try:
        parts = members(source)
    except Exception as error:  # zipfile raises various errors for damaged archives
        said = str(error) or type(error).__name__
        raise damaged(f"it was cut off, or the list of its parts is damaged ({said})") from error
    claimed = [(member, start) for member, start in parts if member.file_size]
    if not any(member.CRC for member, _ in claimed):
        return False
    computed = _computed(data, [(start, member.file_size) for member, start in claimed])
    for (member, _), checksum in zip(claimed, computed, strict=True):
        if checksum != member.CRC:
            raise damaged(f"{member.filename!r} in it does not have the checksum that was saved with it")
    return True


def damaged(why: str) -> CheckpointError:
    return CheckpointError(f"the file is damaged: {why}. Use another copy of it, or an older checkpoint")


def members(source: Any) -> list[tuple[zipfile.ZipInfo, int]]:
    """Find the members of an archive, with the places where their contents begin. Raise an error
    for what other readers of the archive could take for something else, or need more memory for
    than the archive has bytes."""
    data = ByteSource(source)
    with zipfile.ZipFile(source if hasattr(source, "fileno") else io.BytesIO(source)) as archive:
        listed, rest = archive.infolist(), data.size
        if min((member.header_offset for member in listed), default=0) != 0:
            raise zipfile.BadZipFile("it does not begin with its first part")
        if len({member.filename for member in listed}) < len(listed):
            raise zipfile.BadZipFile("two of its parts have the same name")
        for member in listed:
            rest -= member.file_size
            if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
                raise zipfile.BadZipFile(f"{member.filename!r} is compressed, and save() compresses nothing")
            if member.external_attr & DIRECTORY:  # torch would read nothing
                raise zipfile.BadZipFile(f"{member.filename!r} claims to be a directory")
            if rest < 0 or member.header_offset + member.file_size > data.size:
                raise zipfile.BadZipFile(f"{member.filename!r} is larger than the file")
            archive.open(member).close()  # compares the name in the list with that in the member's header
    return [(member, _start(data, member.header_offset)) for member in listed]


def _start(data: ByteSource, header: int) -> int:
    lengths = data.read(header + LENGTHS_AT, 4)
    return header + HEADER_BYTES + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")


def _computed(data: ByteSource, parts: list[tuple[int, int]]) -> list[int]:
    """Compute the checksums of these parts of the data, given by their places and lengths."""

    def computed(part: tuple[int, int]) -> int:
        start, length = part
        checksum, buffer = 0, bytearray(min(PIECE, length))
        for at in range(start, start + length, PIECE):
            with data.view(at, min(PIECE, start + length - at), buffer) as piece:
                checksum = crc32(piece, checksum)
        return checksum

    if data.size <= ALONE:
        return list(map(computed, parts))
    with ThreadPoolExecutor(THREADS, thread_name_prefix="raysgd-checksums") as pool:
        return list(pool.map(computed, parts))


def digest_of(source: Any) -> str:
    """Compute the SHA-256 of bytes, or of the rest of an open file."""
    if not hasattr(source, "fileno"):
        return hashlib.sha256(source).hexdigest()
    digest, buffer = hashlib.sha256(), memoryview(bytearray(PIECE))
    while count := source.readinto(buffer):
        digest.update(buffer[:count])
    return digest.hexdigest()
