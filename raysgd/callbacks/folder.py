"""Where a trainer's results lie, and of which ranks they are."""

from __future__ import annotations

import itertools
import os
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

from raysgd.errors import ConfigError
from raysgd.storage.locations import Uri, place

__all__ = ["chosen_worker", "chosen_workers", "folder_to_be", "made_folder"]

RESULTS = "ray_results"


def made_folder(given: str | os.PathLike[str] | None, prefix: str) -> Path:
    """A relative path lies in the default results directory. Without one, a name of its own, of the time."""
    home = Path.home() / RESULTS
    if given is not None:
        path = home / Path(given).expanduser()
        path.mkdir(parents=True, exist_ok=True)
        return path
    name = f"{prefix}_{_now()}"
    for number in itertools.count(1):
        path = home / (name if number == 1 else f"{name}_{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        break
    return path


def folder_to_be(given: str | os.PathLike[str] | None, prefix: str) -> Path:
    """The same, for whoever may never write anything: nothing is made, so only chance keeps the name free."""
    if given is not None and isinstance(place(given), Uri):
        raise ConfigError(
            f"logdir must be a directory of this machine, got {str(place(given))!r}: callbacks write files there"
        )
    home = Path.home() / RESULTS
    return home / (f"{prefix}_{_now()}_{uuid.uuid4().hex[:4]}" if given is None else Path(given).expanduser())


def _now() -> str:
    return time.strftime("%Y-%m-%d_%H-%M-%S")


def chosen_worker(given: int) -> int:
    """The one rank whose reports a callback is to log."""
    if not isinstance(given, int) or isinstance(given, bool) or given < 0:
        raise ConfigError(f"worker_to_log must be one rank (0, 1, ...), got {given!r}")
    return given


def chosen_workers(given: int | Iterable[int] | None) -> tuple[int, ...] | None:
    """The ranks that a callback is to log; None for all of them."""
    if given is None:
        return None
    ranks = (given,) if isinstance(given, int) else tuple(given)
    wrong = [rank for rank in ranks if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0]
    if wrong or not ranks:
        raise ConfigError(f"workers_to_log must be a rank, a list of ranks, or None for all of them, got {given!r}")
    return ranks
