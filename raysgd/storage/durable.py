"""Write and rename files so that they are on the disk; private folders. Both."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import logging
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

logger = logging.getLogger("raysgd")

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

PIECE = 32 << 20
FULL = ". The file is incomplete, and an older one is unchanged. Free space there, or choose another folder"
_to_disk = getattr(os, "fdatasync", os.fsync)


class DurableFile(io.FileIO):
    """An unbuffered binary file. While a large file is being written, a thread flushes what was
    written so far to the disk, so that `sync` has little left to do."""

    def __init__(self, path: Any, mode: str = "wb", opener: Any = None) -> None:
        super().__init__(path, mode, opener=opener)
        self._written = self._flushed = 0
        self._thread: ThreadPoolExecutor | None = None
        self._flushing: Future[None] | None = None

    def write(self, data: Any) -> int:
        """Write at most one piece and return its length, as an unbuffered file may."""
        with self._named():
            count = super().write(memoryview(data).cast("B")[:PIECE]) or 0
        self._written += count
        if self._written - self._flushed >= PIECE and (self._flushing is None or self._flushing.done()):
            self._settle()
            self._flushed = self._written
            try:
                self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="raysgd-disk")
                self._flushing = self._thread.submit(_to_disk, self.fileno())
            except RuntimeError:
                pass  # the interpreter is exiting and starts no more threads: `sync` flushes everything
        return count

    def write_all(self, data: Any) -> None:
        rest = memoryview(data).cast("B")
        while rest:
            rest = rest[self.write(rest) :]

    def sync(self) -> None:
        """Wait until everything is on the disk. The system reports an error only once, so this also
        raises one that the thread got earlier."""
        self._settle()
        with self._named():
            os.fsync(self.fileno())

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """A context in which the system's errors get the file's name, and what to do."""
        try:
            yield
        except OSError as error:
            if error.errno is None:
                raise
            text = f"{error.strerror}{FULL * (error.errno in (errno.ENOSPC, errno.EDQUOT))}"
            raise OSError(error.errno, text, os.fspath(self.name)) from None

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()  # first: another file could get the descriptor that it uses
            self._thread = None
        super().close()

    def _settle(self) -> None:
        flushing, self._flushing = self._flushing, None
        if flushing is not None:
            with self._named():
                flushing.result()


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder in place of `target`, and return when that is on the disk."""
    os.replace(source, target)
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # a folder in which one may create files, but not list them
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot do this for folders
            raise
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create a folder and those above it. Return when their names are on the disk."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def _host_mark() -> str:
    """A short name of this boot of the machine, "" if it is unknown."""
    try:
        return hashlib.sha256(BOOT_ID.read_bytes()).hexdigest()[:8]
    except OSError:
        return ""


def open_locked(path: Any, flags: int, mode: int) -> int:
    """Open or create a file, lock it for as long as it is open, and return its descriptor."""
    while True:
        descriptor = os.open(path, flags, mode)
        if _locked(descriptor, path):
            return descriptor
        os.close(descriptor)


def own_folder(parent: Path, name: str) -> Path:
    """Create a folder of this process and its forks. Delete those of processes that ended."""
    begin = f"{name}-{_host_mark()}-"
    for entry in os.listdir(parent):
        if entry.startswith(begin) and _host_mark():
            _remove_unlocked(parent / entry)
    while True:
        folder = parent / f"{begin}{uuid.uuid4().hex[:8]}"
        folder.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(folder, os.O_RDONLY)  # it stays open, and so locked, until the process ends
            if _locked(descriptor, folder):
                return folder
            os.close(descriptor)


def private_place(what: str) -> Path:
    """The folder that this user's processes on this machine share for a purpose."""
    return Path(tempfile.gettempdir()) / f"raysgd-{what}-{os.getuid()}"


def private_folder(folder: Path) -> Path:
    """Create a folder, unless it exists, and return it. Raise PermissionError unless it is a folder
    of this user that no other user can open: in the temporary folder, everybody can create
    something with its name first."""
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        # What is open is what is checked. A link is not followed, because its owner could change it after the check.
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:  # another process has just removed it
        raise
    except OSError as error:
        raise PermissionError(_not_private(folder, str(error.strerror))) from error
    try:
        info = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise PermissionError(_not_private(folder, f"user {info.st_uid}, mode {stat.S_IMODE(info.st_mode):o}"))
    return folder


def _not_private(folder: Path, state: str) -> str:
    return (
        f"{folder} must be a folder of this user that no other user can open (mode 700), and is not ({state}): delete it, or set "
        "TMPDIR to a folder of your own"
    )


def _locked(descriptor: int, path: Any) -> bool:
    """Lock what was just created. Return False if another process has deleted it already."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
    except OSError as error:  # no other process can lock it either, so none will delete it
        logger.debug("%s cannot be locked: %s", path, error)
        return True


def _remove_unlocked(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
            logger.info("deleted %s, which a killed process left behind", folder)
        finally:
            os.close(descriptor)
    except OSError as error:  # it is in use, belongs to another user, or was just renamed
        logger.debug("%s was not deleted: %s", folder, error)
