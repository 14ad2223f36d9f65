"""Where the bytes of a message are put while they come in."""

from __future__ import annotations

import logging
import mmap
import os
import tempfile

__all__ = ["LARGE", "Landing", "landed", "landing"]

LARGE = 64 << 20
Landing = bytearray | mmap.mmap

logger = logging.getLogger(__name__)


def landing(size: int) -> Landing:
    """Room for so many bytes. Large ones (whole states) go to a temporary file without a name, so that a driver on a small
    machine need not have a model's memory."""
    if size < LARGE or not hasattr(os, "posix_fallocate"):
        return bytearray(size)
    try:
        with tempfile.TemporaryFile(prefix="raysgd-") as file:
            os.posix_fallocate(file.fileno(), 0, size)  # now, since a full disk could not be told later
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        logger.info("%d bytes are kept in memory, as no temporary file takes them: %s", size, error)
        return bytearray(size)


def landed(room: Landing) -> Landing:
    """All is there: the system may put it out of memory until somebody looks."""
    if isinstance(room, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        room.madvise(mmap.MADV_DONTNEED)
    return room
