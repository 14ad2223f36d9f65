"""Choose and create the directories on this machine in which callbacks write. Driver."""

from __future__ import annotations

import itertools
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from raysgd.errors import ConfigError
from raysgd.storage.locations import place
from raysgd.storage.remote import Uri

RESULTS = "ray_results"


def create_folder(where: str | os.PathLike[str] | None, prefix: str) -> Path:
    """Create a directory below ~/ray_results, by default one with the time in its name."""
    home = Path.home() / RESULTS
    if where is None:
        return create_new_folder(home, f"{prefix}_{timestamp()}")
    path = home / Path(where).expanduser()
    path.mkdir(parents=True, exist_ok=True)
    return path


def create_new_folder(home: Path, name: str) -> Path:
    """Create the directory `name` in `home`, or, if that exists, `name_2`, `name_3` and so on."""
    for candidate in numbered(name):
        try:
            (home / candidate).mkdir(parents=True)
        except FileExistsError:
            continue
        return home / candidate
    raise AssertionError("there is always another number")


def numbered(name: str) -> Iterator[str]:
    """Yield `name`, `name_2`, `name_3` and so on."""
    yield name
    yield from (f"{name}_{number}" for number in itertools.count(2))


def folder_to_be(where: str | os.PathLike[str] | None, prefix: str) -> Path:
    """Choose a directory without creating it, because nothing may ever be written there. A random
    suffix makes it unlikely that another trainer takes the name."""
    if where is not None and isinstance(place(where, "logdir"), Uri):
        raise ConfigError(
            f"logdir must be a directory on this machine, because callbacks write files there, got {str(place(where))!r}"
        )
    home = Path.home() / RESULTS
    return home / (f"{prefix}_{timestamp()}_{uuid.uuid4().hex[:4]}" if where is None else Path(where).expanduser())


def timestamp() -> str:
    """The local time, for the name of a run."""
    return time.strftime("%Y-%m-%d_%H-%M-%S")
