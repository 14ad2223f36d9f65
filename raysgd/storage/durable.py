"""Files that are on the disk, and not only in the system's memory, when they are said to be; and the files and folders
that killed processes left behind."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import shutil
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # not on Windows, where drafts of killed processes stay
    fcntl = None  # type: ignore[assignment]

__all__ = ["DurableFile", "host_mark", "open_locked", "own_folder", "remove_abandoned"]

logger = logging.getLogger("raysgd")

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
ABANDONED_S = 3600.0

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


def host_mark() -> str:
    """Return a short name of this running system, the same in all its containers. Empty where it is not known."""
    try:
        return hashlib.sha256(BOOT_ID.read_bytes()).hexdigest()[:8]
    except OSError:
        return ""


def open_locked(path: Any, flags: int, mode: int) -> int:
    """Create a draft and lock it for as long as it is open. Return its descriptor."""
    while True:
        descriptor = os.open(path, flags, mode)
        if _locked(descriptor, path):
            return descriptor
        os.close(descriptor)


def own_folder(parent: Path, name: str) -> Path:
    """Create a folder that belongs to this process and its forks. Delete those of processes that have ended."""
    begin = f"{name}-{host_mark()}-"
    for found in os.listdir(parent):
        if found.startswith(begin):
            _remove_unlocked(parent / found)
    while True:
        folder = parent / f"{begin}{uuid.uuid4().hex[:8]}"
        folder.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(folder, os.O_RDONLY)  # it stays open, and locked, until the process ends
            if _locked(descriptor, folder):
                return folder
            os.close(descriptor)


def _locked(descriptor: int, path: Any) -> bool:
    """Lock what was just created; False if another process took it for abandoned, and deleted it, before."""
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
    except OSError as error:  # then no other process can lock it either, and none will delete it
        logger.debug("%s cannot be locked: %s", path, error)
        return True


def remove_abandoned(folder: Path, name: str) -> None:
    """Delete drafts `.name.host.*.tmp` of processes that ended before they could. Such a draft was made on this running
    system, so its lock would show here if its process were alive; and nothing was written to it for an hour."""
    begin = f".{name}.{host_mark()}."
    for found in os.listdir(folder):
        if found.startswith(begin) and found.endswith(".tmp"):
            _remove_unlocked(folder / found, older_than_s=ABANDONED_S)


def _remove_unlocked(path: Path, *, older_than_s: float = 0.0) -> None:
    if fcntl is None or not host_mark():
        return
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW if path.is_dir() else os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(descriptor).st_mtime >= older_than_s:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                logger.info("deleted %s, which an earlier process left behind when it was killed", path)
        finally:
            os.close(descriptor)
    except OSError as error:  # it is in use, or another user's, or was renamed this very moment
        logger.debug("%s was left where it is: %s", path, error)
