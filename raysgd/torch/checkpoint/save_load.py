"""Save a trainer's state to files and load it: each file is complete or absent, and is checked before it is loaded. Driver."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from raysgd.core.protocols import Call
from raysgd.engine.engine import Job
from raysgd.errors import CheckpointError, ConfigError, RemoteTraceback
from raysgd.storage import checksums, locations, remote
from raysgd.storage.folders import FileEntry, entry_of_bytes
from raysgd.torch import replica_calls
from raysgd.torch.checkpoint import packing, shard_files, states
from raysgd.torch.checkpoint.files import SeenFile, UnseenError, readable, verified_file
from raysgd.training.saves import SaveHandle, Saves
from raysgd.training.writing import Report
from raysgd.workers.blob import Blob

__all__ = ["Checkpoints"]

logger = logging.getLogger("raysgd")

SHARDS_STALL_S = 24 * 3600.0  # at a URI, a rank reports only when it has written its part


class Checkpoints(Saves):
    """Saves and loads. The workers, or files, have the state."""

    def save_shards(self, path: str | os.PathLike[str], *, blocking: bool) -> str | SaveHandle:
        draft = ShardedDraft(locations.place_to_save(path))
        stall_s = SHARDS_STALL_S if isinstance(draft.where, locations.Uri) else 0.0
        ranks = partial(getattr, self._engine, "world_size")
        return self.write(draft, replica_calls.save_shards, ranks, blocking=blocking, stall_s=stall_s)

    # -- load -----------------------------------------------------------------------------------------

    def load(self, path: str | os.PathLike[str], *, trusted: bool) -> None:
        where = locations.place_to_load(path)
        try:
            with readable():
                is_folder = isinstance(where, Path) and where.is_dir()
                is_folder = is_folder or (isinstance(where, locations.Uri) and where.is_dir())
            load = self._load_shards if is_folder else self._load_file
            has_checksums = load(where, trusted=trusted)
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}") from error
        if not has_checksums:
            locations.warn_without_checksums(where)

    def restore(self, data: Any, *, trusted: bool) -> None:
        """Send a checkpoint to the workers, which check it and load it."""
        self._take(replica_calls.restore, {"source": Blob(data), "trusted": trusted})

    def _load_file(self, where: locations.Place, *, trusted: bool) -> bool:
        """Let the workers read the file themselves, if they all see it. Return whether it has checksums."""
        if isinstance(where, Path):
            file, has_checksums = verified_file(where)
            if file is not None:
                try:
                    # A file without checksums could change unnoticed, and only workers read one that may contain code.
                    keep = has_checksums and not trusted and self._engine.keeps_snapshots
                    loaded = LoadedFile(file) if keep else None
                    arguments = {"source": file, "trusted": trusted, "kept": keep}
                    self._take(replica_calls.restore, arguments, loaded)
                    return has_checksums
                except UnseenError:
                    logger.debug("a worker does not see %s, or cannot read it, so the driver sends its content", where)
        data = locations.read(where)
        has_checksums = checksums.verify(data)
        self.restore(data, trusted=trusted)
        return has_checksums

    def _load_shards(self, folder: Any, *, trusted: bool) -> bool:
        """Return True: a folder has digests."""
        if not trusted:
            raise CheckpointError(
                "this is a directory, as save(sharded=True) writes it: torch keeps a pickled index in it, and reading "
                "that can run code. If you trust its author, pass trusted=True"
            )
        if isinstance(folder, Path):
            with readable():
                files = shard_files.read_manifest(folder)
            self._take(replica_calls.restore_shards, {"folder": folder.absolute(), "files": files})
            return True
        inner, files = shard_files.of_list(remote.listed(folder))
        if remote.is_in_this_process(folder):
            with locations.folder(folder) as local:
                return self._load_shards(local / inner, trusted=trusted)
        self._take(replica_calls.restore_shards, {"folder": folder / inner, "files": files})
        return True

    def _take(self, restore: Callable[..., Any], arguments: dict[str, Any], loaded: LoadedFile | None = None) -> None:
        """Load a state on all ranks. If one of them refuses it, none loads it, and the reason is raised. Keep the file that was
        `loaded`, if there is one, for new workers."""
        with self._engine.state_replaced_by_hand():
            # Counted here, so that a rank that loaded this state before the call was repeated has the same number as others.
            loads = self._engine.progress.loads + 1
            values = self._run(restore, {**arguments, "loads": loads})
            refused = [value for value in values if isinstance(value, replica_calls.Refusal)]
            if any(value.unseen for value in refused):
                raise UnseenError
            if refused:
                raise CheckpointError(refused[0].why) from RemoteTraceback(refused[0].trace)
            if loaded is not None:
                self._engine.keep_state(partial(loaded.state, loads, self._engine.world_size))

    def _run(self, method: Callable[..., Any], arguments: dict[str, Any], **job: Any) -> list[Any]:
        return self._engine.run(Job(Call(method, arguments), **job))[-1].values


class LoadedFile:
    """Keeps a checkpoint that the workers load open: if they all fail before there is a snapshot, new workers start from it.
    The file may be renamed or removed meanwhile, but not changed."""

    def __init__(self, file: SeenFile) -> None:
        self._loaded = file
        with file.opened() as content:
            self._descriptor = os.dup(content.fileno())
        weakref.finalize(self, os.close, self._descriptor)

    def state(self, loads: int, world_size: int) -> memoryview:
        """Return the content as a worker's snapshot would have been after the load. `loads` is how often the user has loaded a
        state, and `world_size` how many workers there were. Raise CheckpointError if the file has changed."""
        try:
            with os.fdopen(os.dup(self._descriptor), "rb") as file:
                if SeenFile.of(file, Path(self._loaded.path)) != self._loaded:
                    raise CheckpointError("the file has changed since")
                checksums.verify(file)
                file.seek(0)
                state = states.shaped(torch.load(file, map_location="cpu", weights_only=True))
            state.pop("rng", None)
            state["position"] = {**state["position"], "call": -1, "call_done": False, "loads": loads}
            state["validation_position"] = {**state["validation_position"], "call": -1, "ended": True}
            state["test_position"] = {**state.get("test_position", {}), "call": -1}
            state["world_size"] = world_size
        except Exception as error:
            raise CheckpointError(
                f"all workers failed before there was a snapshot of the checkpoint that they had loaded, and it cannot be read "
                f"again ({error}). Create a new trainer, and load another checkpoint: {self._loaded.path}"
            ) from error
        return packing.joined(packing.pack(state, copy=False))


class ShardedDraft:
    """The draft of a sharded checkpoint: a folder to which ranks write their parts.

    At a URI, it is a folder in that of the checkpoint. It replaces an older one when its files are listed."""

    def __init__(self, where: locations.Place) -> None:
        self.where, self._target = where, locations.check_folder(where)
        self._draft: locations.Place | None = None
        if isinstance(where, locations.Uri):
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
    def _uri(self) -> locations.Uri:
        assert isinstance(self.where, locations.Uri)
        return self.where

    def complete(self, reports: Sequence[Report], given: Callable[[], Any]) -> None:
        files = {name: FileEntry(*entry) for report in reports for name, entry in report.items()}
        draft = self._draft
        if isinstance(draft, Path):
            shard_files.write_manifest(draft, files)
            if self._target is not None:
                locations.put_folder(draft, self._target)
            else:
                remote.write_folder(self._uri, draft.parent)
                _remove(draft.parent)
        else:
            assert draft is not None
            manifest = shard_files.manifest(files)
            remote.write(draft / shard_files.MANIFEST, manifest)
            entries = {**files, shard_files.MANIFEST: entry_of_bytes(manifest)}
            older = remote.listed(self._uri) if self._uri.is_dir() else {}
            remote.complete_folder(self._uri, {f"{draft.name}/{name}": each for name, each in entries.items()}, older)
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
