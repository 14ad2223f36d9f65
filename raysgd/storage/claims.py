"""Let one trainer at a time write to a folder, on this machine or in remote storage. Driver."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import uuid
import weakref
from pathlib import Path

from raysgd.errors import CheckpointError, ConfigError
from raysgd.storage import locations
from raysgd.storage.locations import Place

logger = logging.getLogger("raysgd")

OWNER = ".raysgd-run"


class FolderClaim:
    """The right of one trainer to write to a folder.

    A folder of this machine is locked: a second claim is refused, until the first one is released,
    or its process ends, however it ends. The forks of a process do not keep its lock. Where nothing
    can be locked, as in remote storage, the second claim takes the folder over, and `check` raises
    an error for the first one.
    """

    def __init__(self, folder: Place) -> None:
        self._folder, self._file = folder, folder / OWNER
        self._owner = f"process {os.getpid()} on {socket.gethostname()} ({uuid.uuid4().hex[:8]})".encode()
        self._descriptor: int | None = None
        self._released = False
        if isinstance(folder, Path):
            self._lock(folder)

    def _lock(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(folder / OWNER, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise CheckpointError(f"{folder} cannot hold checkpoints: {error}") from error
        self._close = weakref.finalize(self, os.close, descriptor)
        self._close.atexit = False
        os.register_at_fork(after_in_child=self._close)  # or else a fork that outlives this process keeps the lock
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 1000).decode(errors="replace") or "another process"
            self._close()
            raise ConfigError(
                f"{folder} is in use by the trainer of {owner}: shut that one down first, or pass another path"
            ) from None
        except OSError as error:
            logger.debug("%s cannot be locked: %s", folder, error)
        self._descriptor = descriptor

    def take(self) -> None:
        """Note in the folder who uses it."""
        if self._descriptor is None:
            locations.write(self._file, self._owner)
        else:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, self._owner, 0)

    def check(self) -> None:
        """Raise CheckpointError if the folder is another trainer's now, or was released."""
        if self._released:
            raise CheckpointError(f"{self._folder} is not in use any more: the trainer was shut down")
        try:
            owner = locations.read(self._file)
        except CheckpointError:
            if self._file.is_file():
                raise
            return  # the folder was deleted: nobody else uses it
        if owner != self._owner:
            raise CheckpointError(
                f"the trainer of {owner[:1000].decode(errors='replace')} uses {self._folder}, too, so this one saves nothing there: "
                "give each run a path of its own"
            )

    def release(self) -> None:
        self._released = True
        if self._descriptor is not None:
            self._close()
