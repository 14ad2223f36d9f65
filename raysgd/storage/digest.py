"""Compute digests of files, append one to bytes, and verify it before anything else is read. Both.

A digest is a SHA-256 over the SHA-256 digests of a file's chunks, so that several threads can compute it. It detects damage, but
it is not a signature: anyone who can change the file can change the digest.

Programs that do not know the digest can still read what it was appended to: a pickle, and a tar archive, end before it.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from raysgd.errors import CheckpointError
from raysgd.storage.checksums import ByteSource

CHUNK = 8 << 20
THREADS = 2
MAGIC = b"\nraysgd-sha256-1 "
SEAL_BYTES = len(MAGIC) + 2 * hashlib.sha256().digest_size + 1


def sealed(data: Any) -> bytes:
    """Return these bytes with their digest."""
    return b"".join((data, MAGIC, digest_of(data).encode(), b"\n"))


def is_sealed(data: bytes) -> bool:
    """Return whether these bytes end with a digest."""
    return data[-SEAL_BYTES:].startswith(MAGIC)


def verify(data: bytes) -> bool:
    """Verify the digest at the end of bytes, and return False if they have none. Raise CheckpointError if the digest differs from
    that of the bytes before it."""
    if not is_sealed(data):
        return False
    saved, actual = data[-SEAL_BYTES + len(MAGIC) : -1].decode("latin-1"), digest_of(memoryview(data)[:-SEAL_BYTES])
    if actual != saved:
        raise CheckpointError(
            f"the file is damaged: its content does not have the digest that was saved with it (saved {saved[:16]}..., "
            f"read {actual[:16]}...). Use another copy of it, or an older checkpoint"
        )
    return True


def digest_of(source: Any) -> str:
    """Return the digest of bytes or of an open file, including a digest at their end."""
    data = ByteSource(source)
    starts, threads = range(0, data.size, CHUNK), THREADS if data.size > CHUNK else 1

    def digests(part: range) -> list[bytes]:
        found, buffer = [], bytearray(CHUNK)
        for start in part:
            with data.view(start, CHUNK, buffer) as chunk:
                found.append(hashlib.sha256(chunk).digest())
        return found

    parts = [starts[first::threads] for first in range(threads)]
    with ThreadPoolExecutor(threads, thread_name_prefix="raysgd-digest") as pool:
        found = list(pool.map(digests, parts) if threads > 1 else map(digests, parts))
    return hashlib.sha256(b"".join(found[at % threads][at // threads] for at in range(len(starts)))).hexdigest()
