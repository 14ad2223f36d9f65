"""What a sharded checkpoint's folder says of itself: the size and digest of each file, in a JSON file written last."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from raysgd.errors import CheckpointError
from raysgd.storage import locations
from raysgd.storage.digest import file_digest

__all__ = ["NAME", "described", "read", "verify", "write"]

NAME = "raysgd.json"
FORMAT = "raysgd-torch-sharded"
VERSION = 1
LARGEST = 64 << 20

Files = dict[str, dict[str, Any]]


def described(folder: str | Path, names: Iterable[str]) -> Files:
    """Return the size and digest of these files, as the manifest has them."""
    found: Files = {}
    for name in sorted(names):
        with open(Path(folder) / name, "rb") as file:
            found[name] = {"size": os.fstat(file.fileno()).st_size, "sha256": file_digest(file)}
    return found


def write(folder: Path, files: Files) -> None:
    """Write the manifest of a folder. Files that no worker has described are described here."""
    files = {**files, **described(folder, _names(folder) - files.keys())}
    content = {"format": FORMAT, "version": VERSION, "files": files}
    locations.write(folder / NAME, json.dumps(content, indent=1, sort_keys=True).encode())


def read(folder: Path) -> Files | None:
    """Return the folder's manifest, after comparing the names and sizes with what is there; None when there is none.
    Raises CheckpointError for a link or anything else that is no file, and for a file that is missing or unknown."""
    names = _names(folder)
    if not (folder / NAME).exists():
        return None
    files = _parsed(folder)
    missing, unknown = sorted(files.keys() - names), sorted(names - files.keys())
    if missing or unknown:
        raise CheckpointError(
            f"this is no whole checkpoint in parts: the folder has other files than {NAME} lists: missing {missing[:4] or 'none'}, "
            f"unknown {unknown[:4] or 'none'}"
        )
    for name, known in files.items():
        size = (folder / name).stat().st_size
        if size != known["size"]:
            raise CheckpointError(f"{name} is damaged: it has {size} bytes, and had {known['size']} when it was saved")
    return files


def verify(folder: str | Path, files: Files) -> None:
    """Raise CheckpointError unless these files have the sizes and digests that the manifest says."""
    for name, known in files.items():
        try:
            found = described(folder, [name])[name]
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read ({error})") from error
        if found != known:
            raise CheckpointError(
                f"{name} is damaged: its content does not have the digest that was saved with it. Use another copy of it, "
                "or an older checkpoint"
            )


def _names(folder: Path) -> set[str]:
    """The files in it, without the manifest."""
    names = set()
    with os.scandir(folder) as entries:
        for entry in entries:
            if not stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
                raise CheckpointError(
                    f"{entry.name} in the folder is a link, a folder or a device: a checkpoint has files only. Remove it"
                )
            names.add(entry.name)
    return names - {NAME}


def _parsed(folder: Path) -> Files:
    try:
        with open(folder / NAME, "rb") as file:
            content = json.loads(file.read(LARGEST))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{NAME} is damaged: it is no JSON ({type(error).__name__})") from error
    files = content.get("files") if isinstance(content, dict) else None
    if not isinstance(files, dict) or content.get("format") != FORMAT or content.get("version") != VERSION:
        raise CheckpointError(f"{NAME} is damaged, or not a manifest that this version of raysgd reads")
    if not all(_is_described(known) and os.path.basename(name) == name for name, known in files.items()):
        raise CheckpointError(f"{NAME} is damaged: it lists a file without its size and digest")
    return files


def _is_described(known: Any) -> bool:
    return (
        isinstance(known, dict)
        and known.keys() == {"size", "sha256"}
        and type(known["size"]) is int
        and isinstance(known["sha256"], str)
    )
