"""Stored files, as tests read, write and seal them: the module that knows how raysgd stores. `where` is a path or a URI."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from raysgd.storage import checksums, folders, locations
from raysgd.trainer import saves

LIST = ".raysgd-folder.json"  # in a folder: its files, with their sizes and digests


def read(where: Any) -> bytes:
    return locations.read(where)


def write(where: Any, data: bytes) -> None:
    """Store a file, completely or not at all."""
    locations.write(where, data)


def names(where: Any) -> list[str]:
    """Return the names of the files and folders in a folder, without hidden ones."""
    return locations.names(locations.place(where))


def new_folder(where: Any) -> AbstractContextManager[Path]:
    """Return a context with an empty folder to fill, which is stored when it ends."""
    return locations.draft_folder(where)


def copy_logs(folder: Path, where: Any) -> None:
    """Copy a run's logs to its storage."""
    locations.copy_logs(folder, locations.place(where))


def instead(patch: Any, name: str, function: Callable[..., Any]) -> None:
    """Let the driver call this instead of what reads ("read"), writes ("write") or deletes ("delete") files, which it gets first."""
    patch.setattr(locations, name, partial(function, getattr(locations, name)))


def save_limits(patch: Any, **seconds: float) -> None:
    """Set limits of saves in the background: SHUTDOWN_S for all at the end, STALL_AT_LEAST_S for one that does not move."""
    for name, limit_s in seconds.items():
        patch.setattr(saves, name, limit_s)


def after_a_draft_begins(patch: Any, act: Callable[[], Any]) -> None:
    """Let the driver call this when it has created the draft of a file."""
    made: Any = saves.FileDraft.arguments

    def arguments(draft: Any) -> Any:
        act()
        return made.fget(draft)

    patch.setattr(saves.FileDraft, "arguments", property(arguments))


def miss_next_file() -> None:
    """Let this process not see the next file that a load looks for."""
    from raysgd.storage.seen import SeenFile

    real = SeenFile.of

    def of(opened: Any, path: Any) -> Any:
        SeenFile.of = real  # type: ignore[method-assign]
        return replace(real(opened, path), size=-1)

    SeenFile.of = of  # type: ignore[method-assign, assignment]


def instead_of_storing(function: Callable[[], Any]) -> None:
    """Let this process call this when it would store what it has of a sharded checkpoint."""
    from raysgd.torch.state import shard_files

    shard_files._store = lambda *_: function()


def state_file(state: dict[str, Any]) -> bytes:
    """Return a checkpoint of a TorchTrainer with this content."""
    from raysgd.torch.state import states

    return bytes(states.dump(state))


# -- digests


def list_of(files: dict[str, bytes]) -> bytes:
    """Return the list of files with these contents."""
    return folders.dump_list({name: folders.entry_of_bytes(content) for name, content in files.items()})


def sealed_json(content: dict[str, Any]) -> bytes:
    return folders.dump_json(content)


def list_files(folder: Path) -> None:
    """Store the list of the files that a folder has now."""
    (folder / LIST).write_bytes(folders.dump_list(folders.list_of(folder)))


def entry_of(path: Path) -> dict[str, Any]:
    """Return what the list says of a file."""
    with open(path, "rb") as file:
        return {"size": os.fstat(file.fileno()).st_size, "sha256": checksums.digest_of(file)}


def has_checksums(file: Any) -> bool:
    """Return whether an archive of torch has checksums, all of which are right. Raise CheckpointError if one is wrong."""
    return checksums.verify(file)
