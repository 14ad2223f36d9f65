"""Save and load sharded checkpoints: a folder to which each rank writes its own part. Driver."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
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

    At a URI, it is a folder in that of the checkpoint. It replaces an older one when its files are listed."""

    def __init__(self, where: locations.Place) -> None:
        self.where, self._target = where, locations.check_folder(where)
        self._draft: locations.Place | None = None
        if isinstance(where, Uri):
            other = where.is_file() or (where.is_dir() and not _is_sharded(remote.listed(where)))
        else:
            assert self._target is not None
            other = os.path.lexists(self._target) and not shard_files.is_replaceable(self._target)
        if other:
            raise ConfigError(
                f"{where} exists and contains something else: save(sharded=True) replaces only an empty directory or a sharded "
                "checkpoint; name one of those, or a directory that does not exist"
            )

    def begin(self) -> dict[str, Any]:
        self.drop()
        name = f"{uuid.uuid4().hex[:8]}.tmp"
        if self._target is not None:  # absolute, because workers may run in another directory than the script
            self._draft = self._target.parent / f".{self._target.name}.{name}"
        elif remote.is_in_this_process(self._uri):
            self._draft = Path(tempfile.mkdtemp(prefix="raysgd-shards-")) / name[:8]
        else:
            self._draft = self._uri / name[:8]
        if isinstance(self._draft, Path):
            self._draft.mkdir(parents=True)
        return {"folder": self._draft}

    def size(self) -> int:
        draft = self._draft
        return sum(each.stat().st_size for each in os.scandir(draft)) if isinstance(draft, Path) else 0

    @property
    def _uri(self) -> Uri:
        assert isinstance(self.where, Uri)
        return self.where

    def complete(self, reports: Sequence[Report], given: Callable[[], Any]) -> None:
        files = {name: FileEntry(*entry) for report in reports for name, entry in report.items()}
        draft = self._draft
        assert draft is not None
        if self._target is not None:
            assert isinstance(draft, Path)
            shard_files.write_manifest(draft, files)
            locations.put_folder(draft, self._target)
        elif isinstance(draft, Path):
            remote.write_folder(self._uri, draft.parent)
            _remove(draft.parent)
        else:
            older = remote.listed(self._uri) if self._uri.is_dir() else {}
            remote.complete_folder(self._uri, {f"{draft.name}/{name}": each for name, each in files.items()}, older)
        self._draft = None

    def drop(self) -> None:
        draft, self._draft = self._draft, None
        if isinstance(draft, Path):
            _remove(draft if self._target is not None else draft.parent)
        elif draft is not None:
            try:
                remote.delete(draft)
            except CheckpointError as failed:
                logger.warning("%s, of a save that failed, could not be deleted: %s", draft, failed)


def _is_sharded(listed: shard_files.Files) -> bool:
    try:
        shard_files.of_list(listed)
    except CheckpointError:
        return False
    return True


def _remove(folder: Path) -> None:
    """Delete the folder of a failed save, again and again, because ranks that do not know of the failure yet may still write
    to it."""
    for pause_s in (0.0, 0.1, 0.5, 2.0):
        time.sleep(pause_s)
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
    logger.warning("%s, of a save that failed, could not be deleted", folder)
