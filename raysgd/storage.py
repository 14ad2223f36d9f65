"""Files that are complete or absent."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

from raysgd.errors import CheckpointError

__all__ = ["Draft", "read", "write"]


class Draft:
    """A temporary file beside `path` that becomes it when all is written: no reader ever sees half of it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Not tempfile's: its files are for their owner only, and a checkpoint is for whom the umask says.
        self.temporary = self.path.parent / f".{self.path.name}.{uuid.uuid4().hex[:8]}.tmp"
        self.file = open(self.temporary, "xb", buffering=0)  # noqa: SIM115  (keep and drop close it)

    def again(self) -> None:
        """What was written is void: from the start."""
        self.file.seek(0)
        self.file.truncate()

    def keep(self) -> Path:
        """Syncs, then renames."""
        os.fsync(self.file.fileno())
        self.file.close()
        os.replace(self.temporary, self.path)
        return self.path

    def drop(self) -> None:
        self.file.close()
        self.temporary.unlink(missing_ok=True)


def write(path: str | os.PathLike[str], data: Any) -> Path:
    """Writes bytes: the whole file, or none."""
    draft = Draft(path)
    try:
        left = memoryview(data).cast("B")
        while left:
            left = left[draft.file.write(left) :]
        return draft.keep()
    except BaseException:
        draft.drop()
        raise


def read(path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint at {Path(path).absolute()}") from None
    except IsADirectoryError:
        raise CheckpointError(
            f"{Path(path).absolute()} is a directory; load() takes the file that save() wrote"
        ) from None
