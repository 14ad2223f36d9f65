"""Save and load sharded checkpoints: a folder to which each rank writes its own part. Driver."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from raysgd.engine.engine import Engine
from raysgd.errors import CheckpointError, ConfigError
from raysgd.storage import locations, remote
from raysgd.storage.folders import FileEntry
from raysgd.storage.remote import Uri
from raysgd.storage.seen import readable
from raysgd.torch import replica_calls
from raysgd.torch.checkpoint import shard_files
from raysgd.training.loads import Loads
from raysgd.training.saves import SaveHandle, Saves
from raysgd.training.writing import Report

logger = logging.getLogger("raysgd")

SHARDS_STALL_S = 24 * 3600.0  # at a URI, a rank reports only when it has written its part


def save_shards(saves: Saves, engine: Engine, path: str | os.PathLike[str], *, blocking: bool) -> str | SaveHandle:
    draft = _ShardedDraft(locations.place_to_save(path))
    stall_s = SHARDS_STALL_S if isinstance(draft.where, Uri) else 0.0
    ranks = partial(getattr, engine, "world_size")
    return saves.write(draft, replica_calls.save_shards, ranks, blocking=blocking, stall_s=stall_s)


class ShardedLoads(Loads):
    """Also loads sharded checkpoints."""

    def _load_folder(self, folder: locations.Place, *, trusted: bool) -> None:
        inner = ""
        if isinstance(folder, Path):
            with readable():
                files = shard_files.read_manifest(folder)
        else:
            inner, files = shard_files.of_list(remote.listed(folder))
        if not trusted:
            raise CheckpointError(
                "this is a directory, as save(sharded=True) writes it: torch keeps a pickled index in it, and reading that can run "
                "code. If you trust its author, pass trusted=True"
            )
        if isinstance(folder, Path):
            self.take(replica_calls.restore_shards, {"folder": folder.absolute(), "files": files})
        elif remote.is_in_this_process(folder):
            with locations.folder(folder) as local:
                self.take(replica_calls.restore_shards, {"folder": local / inner, "files": files})
        else:
            self.take(replica_calls.restore_shards, {"folder": folder / inner, "files": files})


class _ShardedDraft:
    """The draft of a sharded checkpoint: a folder to which ranks write their parts.

    At a URI, it is a folder in that of the checkpoint. It replaces an older one when its files are
    listed."""

    def __init__(self, where: locations.Place) -> None:
        self.where, target = where, locations.check_folder(where)
        self._local: locations.FolderDraft | None = None
        self._folder: locations.Place | None = None
        if isinstance(where, Uri):
            other = where.is_file() or (where.is_dir() and not _is_sharded(remote.listed(where)))
        else:
            assert target is not None
            other = os.path.lexists(target) and not shard_files.is_replaceable(target)
        if other:
            raise ConfigError(
                f"{where} exists and contains something else: save(sharded=True) replaces only an empty directory or a sharded "
                "checkpoint; name one of those, or a directory that does not exist"
            )

    def begin(self) -> dict[str, Any]:
        self.drop()
        if isinstance(self.where, Path):
            self._local = locations.FolderDraft(self.where)
            self._folder = self._local.folder
        elif remote.is_in_this_process(self.where):
            self._local = locations.FolderDraft(self.where)
            self._folder = self._local.folder / uuid.uuid4().hex[:8]
            self._folder.mkdir()
        else:
            self._folder = self.where / uuid.uuid4().hex[:8]
        return {"folder": self._folder}

    def size(self) -> int:
        draft = self._folder
        return sum(each.stat().st_size for each in os.scandir(draft)) if isinstance(draft, Path) else 0

    def complete(self, reports: Sequence[Report], given: Callable[[], Any]) -> None:
        files = {name: FileEntry(*entry) for report in reports for name, entry in report.items()}
        if self._local is None:
            assert isinstance(self.where, Uri) and self._folder is not None
            older = remote.listed(self.where) if self.where.is_dir() else {}
            listed = {f"{self._folder.name}/{name}": each for name, each in files.items()}
            remote.complete_folder(self.where, listed, older)
            self._folder = None
        else:
            self._local.keep(files if isinstance(self.where, Path) else {})
            self.drop()

    def drop(self) -> None:
        folder, local, self._folder, self._local = self._folder, self._local, None, None
        if local is not None:
            local.drop()
        elif isinstance(folder, Uri):
            try:
                remote.delete(folder)
            except CheckpointError as failed:
                logger.warning("%s, of a save that failed, could not be deleted: %s", folder, failed)


def _is_sharded(listed: shard_files.Files) -> bool:
    try:
        shard_files.of_list(listed)
    except CheckpointError:
        return False
    return True
