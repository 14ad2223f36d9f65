"""Append a digest to a file, and verify it before anything is read from the file. Both.

The digest is a SHA-256 over the CRC-32 checksums of the file's chunks, so that several threads can compute it, at several
times the speed of SHA-256. It covers every byte before it. It detects damage, but it is not a signature: anyone who can
change the file can change the digest.

Files of earlier versions, and the lists of files in folders, have a SHA-256 over the SHA-256 digests of larger chunks.

Programs that do not know the digest can still read the file: in a zip archive it is the archive's comment, and a pickle
ends before it.
"""

from __future__ import annotations

import hashlib
import io
import os
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from raysgd.errors import CheckpointError

__all__ = [
    "SEAL_BYTES",
    "ByteSource",
    "HashingWriter",
    "SealingWriter",
    "digest_of",
    "is_sealed",
    "seal_buffer",
    "sealed",
    "verify",
]

PIECE = 32 << 20
LARGE = 1 << 20  # hashing a smaller piece takes less time than passing it to another thread
THREADS = 2


class Crc32:
    """A CRC-32 with the methods of hashlib's hashes."""

    def __init__(self, data: Any = b"") -> None:
        self._value = zlib.crc32(data)

    def update(self, data: Any) -> None:
        self._value = zlib.crc32(data, self._value)

    def digest(self) -> bytes:
        return self._value.to_bytes(4, "little")


class Chunks(NamedTuple):
    """How large the chunks of a file are, and what is computed of each."""

    size: int
    hash: Callable[..., Any]


CRC32_CHUNKS, SHA256_CHUNKS = Chunks(1 << 20, Crc32), Chunks(8 << 20, hashlib.sha256)
CRC32_MAGIC, SHA256_MAGIC = b"\nraysgd-crc-32-1 ", b"\nraysgd-sha256-1 "
MAGICS = {CRC32_MAGIC: CRC32_CHUNKS, SHA256_MAGIC: SHA256_CHUNKS}
SEAL_BYTES = len(CRC32_MAGIC) + 2 * hashlib.sha256().digest_size + 1
# A zip archive ends with a record of this signature and size. Its last two bytes are the length of a comment after it.
ZIP_END, ZIP_END_BYTES, LONGEST_COMMENT = b"PK\5\6", 22, 0xFFFF
NO_COMMENT, SEAL_AS_COMMENT = b"\0\0", SEAL_BYTES.to_bytes(2, "little")


class ByteSource:
    """Reads any part of bytes in memory, or of an open file without changing the file's position."""

    def __init__(self, source: Any) -> None:
        self._descriptor = source.fileno() if hasattr(source, "fileno") else None
        self._view = memoryview(b"" if self._descriptor is not None else source).cast("B")
        self.size = len(self._view) if self._descriptor is None else os.fstat(self._descriptor).st_size

    def view(self, start: int, length: int, buffer: bytearray | None = None) -> memoryview:
        """Return the bytes that exist in this range, without copying those in memory. Those of a file are read into the
        buffer, if there is one: memory that is used again takes less time than new memory."""
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

    def release(self) -> None:
        """Give up the bytes in memory."""
        self._view.release()

    def read(self, start: int, length: int) -> bytes:
        """Return a copy of the bytes that exist in this range."""
        return bytes(self.view(start, length))


class HashingWriter(io.RawIOBase):
    """Writes to `raw` and computes the digest of everything that was written, as `sealed` does. It never closes `raw`.

    `failure` is the first error of `raw`. It matters because `torch.save` tries to end its archive after an error,
    which raises another one."""

    failure: BaseException | None = None

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="raysgd-digest")
        self._chunks: list[Any] = []
        self._left = 0  # bytes that the last chunk lacks
        self.written = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Write at most one piece and return its length, as an unbuffered file may."""
        piece = memoryview(data).cast("B")[:PIECE]
        self._put(piece)
        return len(piece)

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far."""
        return hashlib.sha256(b"".join(chunk.digest() for chunk in self._chunks)).hexdigest()

    def close(self) -> None:
        self._pool.shutdown()
        super().close()

    def _put(self, piece: Any) -> None:
        """Write all bytes, and hash them at the same time."""
        left = memoryview(piece)
        hashing = self._hash(left)
        try:
            while left:
                left = left[self._raw.write(left) :]
        except BaseException as error:
            self.failure = self.failure or error
            raise
        finally:
            for future in hashing:
                future.result()
        self.written += len(piece)

    def _hash(self, view: memoryview) -> list[Future[None]]:
        """Add bytes to the digest, on threads if there are many. They must not change until the futures are done."""
        futures, threaded = [], len(view) >= LARGE
        while view:
            if not self._left:
                self._chunks.append(CRC32_CHUNKS.hash())
                self._left = CRC32_CHUNKS.size
            part, chunk = view[: self._left], self._chunks[-1]
            try:
                if threaded:
                    futures.append(self._pool.submit(chunk.update, part))
            except RuntimeError:  # the interpreter is exiting and starts no more threads
                threaded = False
            if not threaded:
                chunk.update(part)
            self._left -= len(part)
            view = view[len(part) :]
        return futures


class SealingWriter(HashingWriter):
    """Writes a zip archive to `raw`, followed by its digest. Call `seal` after the last byte: it writes the archive's
    last two bytes, which depend on whether a digest follows."""

    _held = b""

    def write(self, data: Any) -> int:
        piece = memoryview(data).cast("B")[:PIECE]
        if len(piece) > len(NO_COMMENT):
            self._put(self._held)
            self._put(piece[: -len(NO_COMMENT)])
            self._held = bytes(piece[-len(NO_COMMENT) :])
        else:
            pending = self._held + bytes(piece)
            self._put(pending[: -len(NO_COMMENT)])
            self._held = pending[-len(NO_COMMENT) :]
        return len(piece)

    def seal(self) -> None:
        """End the archive with its digest."""
        _check_no_comment(self._held)
        self._put(SEAL_AS_COMMENT)
        self._held = b""
        self._put(_seal(self.hexdigest()))


def sealed(data: Any) -> bytes:
    """Return these bytes with their digest: as the comment of a zip archive, or after the end of anything else."""
    buffer = io.BytesIO(bytes(data))
    seal_buffer(buffer)
    return buffer.getvalue()


def seal_buffer(buffer: io.BytesIO) -> None:
    """Append the digest of a buffer's content to it, as `sealed` does, without copying the content."""
    with buffer.getbuffer() as view:
        if bytes(view[:2]) == b"PK":
            _check_no_comment(view[-2:])
            view[-2:] = SEAL_AS_COMMENT
        source = ByteSource(view)
        digest = _digest_of(source, len(view), CRC32_CHUNKS)
        source.release()  # or the buffer could not grow
    buffer.seek(0, io.SEEK_END)
    buffer.write(_seal(digest))


def is_sealed(data: Any) -> bool:
    """Return whether these bytes, or this open file, end with a digest."""
    return _saved_digest(ByteSource(data)) is not None


def verify(source: Any) -> bool:
    """Verify the digest at the end of bytes or of an open file, and return False if it has none. Raise CheckpointError
    if the digest differs from that of the bytes before it, or is damaged itself."""
    data = ByteSource(source)
    found = _saved_digest(data)
    if found is None:
        _refuse_damaged_digest(data)
        return False
    saved, chunks = found
    actual = _digest_of(data, data.size - SEAL_BYTES, chunks)
    if actual != saved:
        raise CheckpointError(
            f"the file is damaged: its content does not have the digest that was saved with it (saved {saved[:16]}..., "
            f"read {actual[:16]}...). Use another copy of it, or an older checkpoint"
        )
    return True


def digest_of(source: Any) -> str:
    """Return the digest, made of SHA-256 only, of bytes or of an open file, including a digest at their end."""
    data = ByteSource(source)
    return _digest_of(data, data.size, SHA256_CHUNKS)


def _digest_of(data: ByteSource, size: int, chunks: Chunks) -> str:
    starts, threads = range(0, size, chunks.size), THREADS if size > LARGE else 1

    def digests(part: range) -> list[bytes]:
        found, buffer = [], bytearray(chunks.size)
        for start in part:
            with data.view(start, min(chunks.size, size - start), buffer) as chunk:
                found.append(bytes(chunks.hash(chunk).digest()))
        return found

    parts = [starts[first::threads] for first in range(threads)]
    with ThreadPoolExecutor(threads, thread_name_prefix="raysgd-digest") as pool:
        found = list(pool.map(digests, parts) if threads > 1 else map(digests, parts))
    return hashlib.sha256(b"".join(found[at % threads][at // threads] for at in range(len(starts)))).hexdigest()


def _seal(digest: str) -> bytes:
    return CRC32_MAGIC + digest.encode() + b"\n"


def _saved_digest(data: ByteSource) -> tuple[str, Chunks] | None:
    """Return the digest at the end, and what it was computed of."""
    tail = data.read(data.size - SEAL_BYTES, SEAL_BYTES) if data.size >= SEAL_BYTES else b""
    chunks = MAGICS.get(tail[: len(CRC32_MAGIC)])
    return None if chunks is None else (tail[len(CRC32_MAGIC) : -1].decode("latin-1"), chunks)


def _check_no_comment(end: Any) -> None:
    if end != NO_COMMENT:
        raise ValueError("only a zip archive without a comment can be sealed")


def _refuse_damaged_digest(data: ByteSource) -> None:
    """Raise CheckpointError if a zip archive has, or had, a comment: `torch.save` writes none, so it was a digest.
    Files of other kinds are not checked, because they may contain an archive."""
    if data.read(0, 2) != b"PK":
        return
    length = min(ZIP_END_BYTES + LONGEST_COMMENT, data.size)
    end = data.read(data.size - length, length)
    at = end.rfind(ZIP_END)
    if at >= 0 and (end[at + ZIP_END_BYTES - len(NO_COMMENT) :] or NO_COMMENT) != NO_COMMENT:
        raise CheckpointError(
            "the file is damaged: it was saved with a digest at its end, which is incomplete or was changed. Use another "
            "copy of it, or an older checkpoint"
        )
