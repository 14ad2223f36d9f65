"""Files that are on the disk, and not only in the system's memory, when they are said to be."""

from __future__ import annotations

import contextlib
import io
import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

__all__ = ["DurableFile"]

PIECE = 32 << 20
_to_disk = getattr(os, "fdatasync", os.fsync)


class DurableFile(io.FileIO):
    """A binary file, unbuffered. While a large one is being written, a thread beside the writing sees to it that what was
    written goes to the disk, and leaves the system's memory then. So there is little to wait for in `sync`, and a checkpoint
    does not push out of the cache what is read again, such as training data."""

    def __init__(self, path: Any, mode: str = "wb", opener: Any = None) -> None:
        super().__init__(path, mode, opener=opener)
        self._written = self._begun = self._left = 0
        self._thread: ThreadPoolExecutor | None = None
        self._going: Future[None] | None = None

    def write(self, data: Any) -> int:
        """At most one piece of it, as an unbuffered file may; how many bytes that were."""
        count = super().write(memoryview(data).cast("B")[:PIECE]) or 0
        self._written += count
        if self._written - self._begun >= PIECE and (self._going is None or self._going.done()):
            self._settle()
            self._begun = self._written
            try:
                self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="raysgd-disk")
                self._going = self._thread.submit(self._bring, self._written)
            except RuntimeError:
                pass  # the interpreter is ending, and begins no more threads: `sync` does it all
        return count

    def _bring(self, end: int) -> None:
        _to_disk(self.fileno())
        self._leave(end)

    def _leave(self, end: int) -> None:
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # it is advice, and not all file systems take it
                os.posix_fadvise(self.fileno(), self._left, end - self._left, os.POSIX_FADV_DONTNEED)
        self._left = end

    def again(self) -> None:
        """What was written is void: from the start."""
        self._settle()
        self.seek(0)
        self.truncate()
        self._written = self._begun = self._left = 0

    def sync(self) -> None:
        """All of it is on the disk when this returns. The system tells an error once: one that came earlier is told here."""
        self._settle()
        os.fsync(self.fileno())
        if self._left:  # small files stay in the cache
            self._leave(self._written)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()  # its descriptor must not be another file's
            self._thread = None
        super().close()

    def _settle(self) -> None:
        going, self._going = self._going, None
        if going is not None:
            going.result()
