"""Verify the CRC-32 checksums that a zip archive has of its members, before anything is read from
it. Compute digests of files. Both.

`torch.save` and `zipfile` write a checksum for every member, but `torch.load` does not compare it.
Checksums and digests detect damage. They are not a signature: anyone who can change the file can
change them. Several threads compute the checksums, also those of one large file: it is divided into
parts, whose checksums are combined.
"""

from __future__ import annotations

import functools
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
PART, PIECE = 32 << 20, 1 << 20  # what one thread computes at a time, and what it holds in memory
ALONE = 4 << 20  # a smaller file is verified before another thread has started
ZIP = b"PK"
POLYNOMIAL = 0xEDB88320  # of zip's CRC-32, like all numbers here with x**0 as the highest bit
DIRECTORY = 0x10  # an attribute of a member
HEADER_BYTES, LENGTHS_AT = 30, 26  # of a member's header, which its name and an extra field follow


class ByteSource:
    """Reads any part of bytes, or of an open file without changing its position."""

    def __init__(self, source: Any) -> None:
        self._descriptor = source.fileno() if hasattr(source, "fileno") else None
        self._view = memoryview(b"" if self._descriptor is not None else source).cast("B")
        self.size = len(self._view) if self._descriptor is None else os.fstat(self._descriptor).st_size

    def view(self, start: int, length: int, buffer: bytearray | None = None) -> memoryview:
        """Return the bytes that exist in this range, without copying those in memory. Those of a
        file are read into the buffer, if there is one: memory that is used again takes less time
        than new memory."""
        if self._descriptor is None:
            return self._view[start : start + length]
        length = max(min(length, self.size - start), 0)
        found = memoryview(bytearray(length) if buffer is None else buffer)[:length]
        done = 0
        while done < length:
            count = os.preadv(self._descriptor, [found[done:]], start + done)
            done += count
            if not count:
                raise CheckpointError("the file became shorter while it was being read")
        return found

    def read(self, start: int, length: int) -> bytes:
        """Return a copy of the bytes that exist in this range."""
        return bytes(self.view(start, length))


def verify(source: Any) -> bool:
    """Verify the checksums in bytes or in an open file. Return False if there are none: if it is
    not a zip archive (RaySGD and torch before 1.6 wrote others), or one that was written with
    `set_crc32_options(False)`. Raise CheckpointError if a member is damaged, or the archive is."""
    data = ByteSource(source)
    if data.read(0, len(ZIP)) != ZIP:
        return False
    try:
        members = _members(source, data)
    except Exception as error:  # zipfile raises various errors for damaged archives
        said = str(error) or type(error).__name__
        raise damaged(f"it was cut off, or the list of its parts is damaged ({said})") from error
    claimed = [(member, start) for member, start in members if member.file_size]
    if not any(member.CRC for member, _ in claimed):
        return False
    parts = [
        (start + at, min(PART, member.file_size - at))
        for member, start in claimed
        for at in range(0, member.file_size, PART)
    ]
    found = iter(_computed(data, parts))
    for member, _ in claimed:
        checksum = 0
        for at in range(0, member.file_size, PART):
            checksum = combined(checksum, next(found), min(PART, member.file_size - at))
        if checksum != member.CRC:
            raise damaged(f"{member.filename!r} in it does not have the checksum that was saved with it")
    return True


def damaged(why: str) -> CheckpointError:
    return CheckpointError(f"the file is damaged: {why}. Use another copy of it, or an older checkpoint")


def _members(source: Any, data: ByteSource) -> list[tuple[zipfile.ZipInfo, int]]:
    """Return the members of an archive, with the places where their contents begin. Raise an error
    for what other readers of the archive could take for something else."""
    with zipfile.ZipFile(source if hasattr(source, "fileno") else io.BytesIO(source)) as archive:
        members = archive.infolist()
        if min((member.header_offset for member in members), default=0) != 0:
            raise zipfile.BadZipFile("it does not begin with its first part")
        for member in members:
            if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
                raise zipfile.BadZipFile(f"{member.filename!r} is compressed, and save() compresses nothing")
            if member.external_attr & DIRECTORY:  # torch would read nothing
                raise zipfile.BadZipFile(f"{member.filename!r} claims to be a directory")
            if member.header_offset + member.file_size > data.size:
                raise zipfile.BadZipFile(f"{member.filename!r} is larger than the file")
            archive.open(member).close()  # compares the name in the list with that in the member's header
    return [(member, _start(data, member.header_offset)) for member in members]


def _start(data: ByteSource, header: int) -> int:
    lengths = data.read(header + LENGTHS_AT, 4)
    return header + HEADER_BYTES + int.from_bytes(lengths[:2], "little") + int.from_bytes(lengths[2:], "little")


def _computed(data: ByteSource, parts: list[tuple[int, int]]) -> list[int]:
    """Return the checksums of these parts of the data, given by their places and lengths."""

    def checksums(some: list[tuple[int, int]]) -> list[int]:
        buffer, found = bytearray(PIECE), []
        for start, length in some:
            checksum = 0
            for at in range(start, start + length, PIECE):
                with data.view(at, min(PIECE, start + length - at), buffer) as piece:
                    checksum = crc32(piece, checksum)
            found.append(checksum)
        return found

    threads = THREADS if data.size > ALONE else 1
    shares = [parts[first::threads] for first in range(threads)]
    with ThreadPoolExecutor(threads, thread_name_prefix="raysgd-checksums") as pool:
        found = list(pool.map(checksums, shares) if threads > 1 else map(checksums, shares))
    return [found[at % threads][at // threads] for at in range(len(parts))]


def digest_of(source: Any) -> str:
    """Return the SHA-256 of bytes, or of the rest of an open file."""
    if not hasattr(source, "fileno"):
        return hashlib.sha256(source).hexdigest()
    digest, buffer = hashlib.sha256(), memoryview(bytearray(PIECE))
    while count := source.readinto(buffer):
        digest.update(buffer[:count])
    return digest.hexdigest()


def combined(first: int, second: int, length: int) -> int:
    """Return the checksum of two pieces of data from theirs and the second one's length."""
    return _product(_shift(length), first) ^ second


def _product(one: int, other: int) -> int:
    """Return the product of two polynomials over GF(2), modulo the CRC's."""
    product = 0
    for place in range(31, -1, -1):
        if one >> place & 1:
            product ^= other
        other = other >> 1 ^ (POLYNOMIAL if other & 1 else 0)
    return product


@functools.lru_cache
def _shift(length: int) -> int:
    """Return x**(8 * length): what a checksum is multiplied by when so many bytes follow."""
    result, power = 1 << 31, 1 << 23
    while length:
        result = _product(result, power) if length & 1 else result
        power, length = _product(power, power), length >> 1
    return result
