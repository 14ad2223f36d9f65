"""A digest at the end of a file, with which a reader finds damage before it takes anything from the file.

The digest is a SHA-256 over the SHA-256 digests of the file's chunks, so that several threads can compute it. It covers
every byte before it. It detects damage; it is no signature, because whoever can change the file can change the digest.

A sealed file can be read by those who know nothing of the digest: it is the comment of a zip archive, and lies behind
the end of a pickle.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO

from raysgd.errors import CheckpointError

__all__ = [
    "SEAL_BYTES",
    "Digest",
    "HashingWriter",
    "SealingWriter",
    "file_digest",
    "is_sealed",
    "seal_buffer",
    "sealed",
    "verify",
]

CHUNK = 8 << 20
PIECE = 32 << 20
LARGE = 1 << 20  # a piece that is worth a thread
THREADS = 2
MAGIC = b"\nraysgd-sha256-1 "
SEAL_BYTES = len(MAGIC) + 2 * hashlib.sha256().digest_size + 1
# A zip archive ends with a record of this signature and size, whose last two bytes are the length of a comment after it.
ZIP_END, ZIP_END_BYTES, LONGEST_COMMENT = b"PK\5\6", 22, 0xFFFF
NO_COMMENT = b"\0\0"


class Digest:
    """Computes the digest of bytes that come piece by piece; with a pool, several chunks of a piece at once."""

    def __init__(self, pool: ThreadPoolExecutor | None = None) -> None:
        self._pool = pool
        self._finished: list[bytes] = []
        self._chunk = hashlib.sha256()
        self._filled = 0

    def update(self, data: Any) -> None:
        """Add these bytes."""
        view = memoryview(data).cast("B")
        if self._filled:
            view = self._fill(view)
        whole = len(view) // CHUNK * CHUNK
        chunks = [view[start : start + CHUNK] for start in range(0, whole, CHUNK)]
        self._finished += map(_sha256, chunks) if self._pool is None else self._pool.map(_sha256, chunks)
        self._fill(view[whole:])

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far."""
        last = [self._chunk.digest()] if self._filled else []
        return hashlib.sha256(b"".join([*self._finished, *last])).hexdigest()

    def use_no_threads(self) -> None:
        self._pool = None

    def _fill(self, view: memoryview) -> memoryview:
        """Add to the chunk that is incomplete; return what does not belong to it."""
        mine = view[: CHUNK - self._filled]
        self._chunk.update(mine)
        self._filled += len(mine)
        if self._filled == CHUNK:
            self._finished.append(self._chunk.digest())
            self._chunk, self._filled = hashlib.sha256(), 0
        return view[len(mine) :]


def _sha256(data: Any) -> bytes:
    return hashlib.sha256(data).digest()


class HashingWriter(io.RawIOBase):
    """Writes through to `raw` and computes the digest of all that was written. Does not close `raw`."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="raysgd-digest")
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="raysgd-digest")
        self._digest = Digest(self._pool)
        self.written = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Write at most one piece, and return its length, as an unbuffered file may."""
        piece = memoryview(data).cast("B")[:PIECE]
        added = self._added_beside(piece)
        try:
            _write_all(self._raw, piece)
        finally:
            if added is not None:
                added.result()
        self.written += len(piece)
        return len(piece)

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far."""
        return self._digest.hexdigest()

    def close(self) -> None:
        self._pool.shutdown()
        self._beside.shutdown()
        super().close()

    def _added_beside(self, piece: memoryview) -> Future[None] | None:
        """Add a large piece to the digest while it is being written, and a small one at once."""
        if len(piece) >= LARGE:
            try:
                return self._beside.submit(self._digest.update, piece)
            except RuntimeError:  # the interpreter is ending, and starts no more threads
                self._digest.use_no_threads()
        self._digest.update(piece)
        return None


class SealingWriter(io.RawIOBase):
    """Writes a zip archive through to `raw`, and ends it with its digest. Does not close `raw`.

    Call `seal` after the last byte; a file without it has no digest, and is the archive without its last two bytes. If
    `raw` computes the digest of what is written to it, as a `HashingWriter` does, that one is used.
    """

    def __init__(self, raw: Any) -> None:
        self._own = None if hasattr(raw, "hexdigest") else HashingWriter(raw)
        self._raw = self._own or raw
        self._held = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Write at most one piece, and return its length, as an unbuffered file may."""
        piece = memoryview(data).cast("B")[:PIECE]
        if len(piece) <= len(NO_COMMENT):
            pending = self._held + bytes(piece)
            _write_all(self._raw, pending[: -len(NO_COMMENT)])
            self._held = pending[-len(NO_COMMENT) :]
        else:
            _write_all(self._raw, self._held)
            _write_all(self._raw, piece[: -len(NO_COMMENT)])
            self._held = bytes(piece[-len(NO_COMMENT) :])
        return len(piece)

    def seal(self) -> str:
        """End the archive with its digest, and return that."""
        if self._held != NO_COMMENT:
            raise ValueError("only a zip archive without a comment can be sealed")
        _write_all(self._raw, SEAL_BYTES.to_bytes(2, "little"))
        self._held = b""
        digest = str(self._raw.hexdigest())
        _write_all(self._raw, _seal(digest))
        return digest

    def close(self) -> None:
        if self._own is not None:
            self._own.close()
        super().close()


def sealed(data: Any) -> bytes:
    """Return these bytes with their digest: a zip archive as its comment, anything else behind its end."""
    content = bytes(data)
    if content[:2] == b"PK":
        if content[-2:] != NO_COMMENT:
            raise ValueError("only a zip archive without a comment can be sealed")
        content = content[:-2] + SEAL_BYTES.to_bytes(2, "little")
    digest = Digest()
    digest.update(content)
    return content + _seal(digest.hexdigest())


def seal_buffer(buffer: io.BytesIO) -> None:
    """End what was written to a buffer with its digest, as `sealed` does, without a copy of it."""
    with buffer.getbuffer() as view:
        if bytes(view[:2]) == b"PK":
            if bytes(view[-2:]) != NO_COMMENT:
                raise ValueError("only a zip archive without a comment can be sealed")
            view[-2:] = SEAL_BYTES.to_bytes(2, "little")
        digest = _digest_of(view, len(view))
    buffer.seek(0, io.SEEK_END)
    buffer.write(_seal(digest))


def is_sealed(data: Any) -> bool:
    """Return whether these bytes, or this open file, end with a digest."""
    return _claimed(_tail(data)) is not None


def verify(source: Any) -> bool:
    """Check the digest at the end of bytes or of an open file. Return False when there is none; raise CheckpointError
    when it is not the digest of what lies before it."""
    claimed = _claimed(_tail(source))
    if claimed is None:
        _refuse_damaged_seal(source)
        return False
    actual = _digest_of(source, _size(source) - SEAL_BYTES)
    if actual != claimed:
        raise CheckpointError(
            f"the file is damaged: its content does not have the digest that was saved with it (saved {claimed[:16]}..., "
            f"read {actual[:16]}...). Use another copy of it, or an older checkpoint"
        )
    return True


def _refuse_damaged_seal(source: Any) -> None:
    """Raise CheckpointError when a zip archive has, or had, a comment: `torch.save` writes none, so it was the digest. Other
    files may hold an archive as a part of them."""
    size = _size(source)
    if _head(source) != b"PK":
        return
    end = _tail(source, min(ZIP_END_BYTES + LONGEST_COMMENT, size))
    at = end.rfind(ZIP_END)
    if at >= 0 and (end[at + ZIP_END_BYTES - len(NO_COMMENT) :] or NO_COMMENT) != NO_COMMENT:
        raise CheckpointError(
            "the file is damaged: it was saved with a digest at its end, and that is incomplete or changed. Use another "
            "copy of it, or an older checkpoint"
        )


def file_digest(file: BinaryIO) -> str:
    """Return the digest of a whole open file, whether or not it ends with one."""
    return _digest_of(file, _size(file))


def _digest_of(source: Any, size: int) -> str:
    with ThreadPoolExecutor(THREADS, thread_name_prefix="raysgd-digest") as pool:
        if not hasattr(source, "fileno"):
            digest = Digest(pool)
            digest.update(memoryview(source).cast("B")[:size])
            return digest.hexdigest()
        starts = range(0, size, CHUNK)
        parts = pool.map(lambda start: _sha256(_read_at(source.fileno(), start, min(CHUNK, size - start))), starts)
        return hashlib.sha256(b"".join(parts)).hexdigest()


def _read_at(descriptor: int, start: int, length: int) -> bytes:
    parts = list(_pieces_at(descriptor, start, length))
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _pieces_at(descriptor: int, start: int, length: int) -> Iterator[bytes]:
    end = start + length
    while start < end:
        piece = os.pread(descriptor, end - start, start)
        if not piece:
            raise CheckpointError("the file became shorter while it was being read")
        start += len(piece)
        yield piece


def _size(source: Any) -> int:
    return os.fstat(source.fileno()).st_size if hasattr(source, "fileno") else memoryview(source).nbytes


def _head(source: Any) -> bytes:
    return os.pread(source.fileno(), 2, 0) if hasattr(source, "fileno") else bytes(memoryview(source).cast("B")[:2])


def _tail(source: Any, length: int = SEAL_BYTES) -> bytes:
    """Return the last bytes, or none when there are not that many."""
    size = _size(source)
    if size < length:
        return b""
    if hasattr(source, "fileno"):
        return _read_at(source.fileno(), size - length, length)
    return bytes(memoryview(source).cast("B")[size - length :])


def _seal(digest: str) -> bytes:
    return MAGIC + digest.encode() + b"\n"


def _claimed(tail: bytes) -> str | None:
    found = tail.startswith(MAGIC) and len(tail) == SEAL_BYTES
    return tail[len(MAGIC) : -1].decode("latin-1") if found else None


def _write_all(raw: Any, data: Any) -> None:
    view = memoryview(data).cast("B")
    while view:
        view = view[raw.write(view) :]
