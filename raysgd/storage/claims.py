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
    """The right of one trainer to write to a folder, in which a file names it.

    On this machine, the file is locked: a second claim is refused until the first is released, or
    its process has ended, however it ended. Where nothing can be locked, as in remote storage, the
    newest claim counts, and `check` raises an error for an earlier one.
    """

    def __init__(self, folder: Place) -> None:
        self._folder, self._file = folder, folder / OWNER
        self._owner = f"process {os.getpid()} on {socket.gethostname()} ({uuid.uuid4().hex[:8]})".encode()
        if isinstance(folder, Path):
            self._lock(folder)

    def _lock(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(folder / OWNER, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise CheckpointError(f"{folder} cannot hold checkpoints: {error}") from error
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._close.atexit = False
        os.register_at_fork(after_in_child=self._close)  # or else a fork that outlives this process keeps the lock
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(self._descriptor, 1000).decode(errors="replace") or "another process"
            self._close()
            raise ConfigError(
                f"{folder} is in use by the trainer of {owner}: shut that one down first, or pass another path"
            ) from None
        except OSError as error:
            logger.debug("%s cannot be locked: %s", folder, error)

    def take(self) -> None:
        """Note in the folder who uses it."""
        if isinstance(self._folder, Path):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, self._owner, 0)
        else:
            locations.write(self._file, self._owner)

    def check(self) -> None:
        """Raise CheckpointError if another trainer has taken the folder."""
        if not self._file.is_file():
            return  # the folder was deleted: nobody else uses it
        owner = locations.read(self._file)
        if owner != self._owner:
            raise CheckpointError(
                f"the trainer of {owner[:1000].decode(errors='replace')} uses {self._folder}, too, so this one saves nothing there. Give "
                "each run a path of its own"
            )

    def release(self) -> None:
        if isinstance(self._folder, Path):
            self._close()
