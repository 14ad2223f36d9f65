"""Files that are complete or absent."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

from raysgd.errors import CheckpointError

__all__ = ["read", "write"]


def write(path: str | os.PathLike[str], data: Any) -> Path:
    """Writes bytes to a temporary file beside `path`, syncs it, and renames it: no reader ever sees half of it."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile's: its files are for their owner only, and a checkpoint is for whom the umask says.
    temporary = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return target


def read(path: str | os.PathLike[str]) -> bytes:
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint at {Path(path).absolute()}") from None
    except IsADirectoryError:
        raise CheckpointError(
            f"{Path(path).absolute()} is a directory; load() takes the file that save() wrote"
        ) from None
