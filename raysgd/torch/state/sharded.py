"""Save and load sharded checkpoints: a folder to which each rank writes its own part. Driver."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from raysgd.core.snapshot import Snapshot
from raysgd.engine.engine import Engine
from raysgd.errors import CheckpointError, ConfigError
from raysgd.replica.writing import Report
from raysgd.storage import durable, locations, remote
from raysgd.storage.folders import MARKER, FileEntry, dump_list
from raysgd.storage.remote import Uri
from raysgd.storage.seen import SeenFile, readable
from raysgd.torch import replica_calls
from raysgd.torch.state import shard_files
from raysgd.trainer.auto_checkpoint import CheckpointFolder
from raysgd.trainer.loads import Again, DrawnAnew, Loads, Take
from raysgd.trainer.saves import SaveHandle, Saves
from raysgd.trainer.within_call import Contents

logger = logging.getLogger("raysgd")

SHARDS_STALL_S = 24 * 3600.0  # at a URI, a rank reports only when it has written its part


def save_shards(saves: Saves, engine: Engine, path: str | os.PathLike[str], *, blocking: bool) -> str | SaveHandle:
    where, ranks = locations.place_to_save(path), partial(getattr, engine, "world_size")
    stall_s = SHARDS_STALL_S if isinstance(where, Uri) else 0.0
    return saves.write(where, _ShardedDraft, replica_calls.save_shards, ranks, blocking=blocking, stall_s=stall_s)


class ShardedLoads(Loads):
    """Also loads sharded checkpoints. If the model `is_sharded`, owns what new processes load when
    the workers change: what was loaded last, or the newest automatic checkpoint in the `folder`."""

    def __init__(
        self, engine: Engine, drawn_anew: DrawnAnew, folder: CheckpointFolder | None, *, is_sharded: bool
    ) -> None:
        super().__init__(engine, drawn_anew)
        self._folder, self._is_sharded = folder, is_sharded
        self._saved: list[tuple[str | None, Snapshot]] = []  # with the paths of automatic ones, the newest last
        self._from: tuple[locations.Place, Again] | None = None  # where the newest load was from

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing yet that new processes could load."""
        return not self._saved

    def newest(self, wait: bool) -> Snapshot | None:
        """Choose the newest one that is complete. If none is, choose the one that is being saved;
        with `wait`, wait for that before."""
        folder = self._folder
        if folder is not None and wait:
            folder.wait_until_ended()
        complete = [n for n, (path, _) in enumerate(self._saved) if path is None or (folder and folder.has(path))]
        if complete:
            del self._saved[: complete[-1]]  # in place, because a thread may be adding one
        return self._saved[0][1] if complete or (self._saved and not wait) else None

    def saves(self, path: str, contents: Contents | None = None) -> None:
        assert self._folder is not None
        if not self._is_sharded:
            return
        snapshot = partial(self._snapshot, partial(self._load, path, trusted=self._folder.settings.trusted), None)
        if contents is None:
            self._saved.append((path, snapshot()))
        else:
            within = snapshot(at=contents.progress, workers=contents.ranks)
            self._saved.append((path, replace(within, partial=contents.part)))

    def _loaded(self, again: Again, where: locations.Place | None = None, copy: Again | None = None) -> None:
        if not self._is_sharded:
            return super()._loaded(_unless_replaced(again, where), where, copy)
        self._from = None if where is None else (where, again)
        self._saved = [(None, self._snapshot(_unless_replaced(again, where), self._engine.calls.changes))]

    def note_replaced(self, path: Any) -> None:
        """Note that the trainer has saved its state here, which may be where it has loaded one."""
        if self._from is not None and str(self._from[0]) == path:
            where, again = self._from
            self._saved = [(None, self._snapshot(_unless_replaced(again, where), None))]

    def _load_folder(self, folder: locations.Place, take: Take, *, trusted: bool) -> None:
        with readable():
            inner, files = shard_files.read_manifest(folder)
        if not trusted:
            raise CheckpointError(
                "this is a directory, as save(sharded=True) writes it: torch keeps a pickled index in it, and reading that can run "
                "code. If you trust its author, pass trusted=True"
            )
        if isinstance(folder, Uri) and remote.is_in_this_process(folder):
            with locations.folder(folder) as local:
                take(replica_calls.restore_shards, {"folder": local / inner, "files": files})
        else:
            here = folder.absolute() if isinstance(folder, Path) else folder
            take(replica_calls.restore_shards, {"folder": here / inner, "files": files})


def _unless_replaced(again: Again, where: locations.Place | None) -> Again:
    version = _version(where)

    def load(take: Take) -> None:
        if _version(where) != version:
            raise CheckpointError(f"{where} was replaced since it was loaded")
        again(take)

    return load


def _version(where: locations.Place | None) -> SeenFile | None:
    """A value that changes when a checkpoint in a file system is replaced."""
    if not isinstance(where, Path):
        return None
    path = where / MARKER if where.is_dir() else where
    with readable(), open(path, "rb") as file:
        return SeenFile.of(file, path)


class _ShardedDraft:
    """The draft of a sharded checkpoint: a folder to which ranks write their parts. It becomes a
    folder with a new name in that of the checkpoint, and replaces the one there when its files are
    listed."""

    def __init__(self, where: locations.Place) -> None:
        self._target = target = locations.check_folder(where) or where
        if (target / MARKER).is_file():
            other = not _is_sharded(target)
        else:
            here = target if isinstance(target, Path) and target.is_dir() else None
            other = any(here.iterdir()) if here else target.is_file()
        if other:
            raise ConfigError(
                f"{where} exists and contains something else: save(sharded=True) replaces only an empty directory or a sharded "
                "checkpoint; name one of those, or a directory that does not exist"
            )
        name = uuid.uuid4().hex[:8]
        is_seen = isinstance(target, Path) or remote.is_in_this_process(target)
        self._local = locations.FolderDraft(target) if is_seen else None
        self._folder: locations.Place = (self._local.folder if self._local else target) / name
        self.arguments, self._is_complete = {"folder": self._folder}, False
        try:
            if isinstance(self._folder, Path):
                self._folder.mkdir()
        except BaseException:
            self.drop()
            raise

    def size(self) -> int:
        draft = self._folder
        return sum(each.stat().st_size for each in os.scandir(draft)) if isinstance(draft, Path) else 0

    def complete(self, reports: Sequence[Report], content: Callable[[], Any]) -> None:
        draft = self._folder
        files = {f"{draft.name}/{name}": FileEntry(*each) for report in reports for name, each in report.items()}
        if isinstance(draft, Uri):
            self._replace(files)
        elif isinstance(self._target, Path) and (self._target / MARKER).is_file():
            durable.sync_folder(draft)
            durable.rename(draft, self._target / draft.name)
            self._replace(files)
        else:
            assert self._local is not None
            self._local.keep(files)
        self._is_complete = True

    def _replace(self, files: Mapping[str, FileEntry]) -> None:
        """List the new files in the folder of the checkpoint, and then delete the older ones."""
        target = self._target
        older = shard_files.read_manifest(target)[0] if (target / MARKER).is_file() else ""
        locations.write(target / MARKER, dump_list(files))
        if older:
            try:
                locations.delete(target / older)
            except (OSError, CheckpointError) as error:  # the new files are in place, so the save is complete
                logger.warning("%s, which was replaced, could not be deleted: %s", target / older, error)

    def drop(self) -> None:
        if self._local is not None:
            self._local.drop()
        elif isinstance(self._folder, Uri) and not self._is_complete:
            try:
                remote.delete(self._folder)
            except CheckpointError as failed:
                logger.warning("%s, of a save that failed, could not be deleted: %s", self._folder, failed)


def _is_sharded(where: locations.Place) -> bool:
    try:
        shard_files.read_manifest(where)
    except CheckpointError:
        return False
    return True
