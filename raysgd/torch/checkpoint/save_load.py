"""Save a trainer's state to files and load it: each file is complete or absent, and is checked before it is loaded. Driver."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import shutil
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch

from raysgd.core.protocols import Call
from raysgd.engine.engine import Engine, Job
from raysgd.errors import CheckpointError, ConfigError, RemoteTraceback, described
from raysgd.storage import checksums, locations, remote
from raysgd.storage.folders import FileEntry, entry_of_bytes
from raysgd.torch import replica_calls
from raysgd.torch.checkpoint import packing, shard_files, states
from raysgd.torch.checkpoint.files import SeenFile, UnseenError, readable, verified_file
from raysgd.torch.checkpoint.receiver import FailedOnWorkerError, Receiver
from raysgd.torch.checkpoint.streaming import LocalSink
from raysgd.workers.blob import Blob

__all__ = ["Checkpoints", "SaveHandle"]

logger = logging.getLogger("raysgd")

SHUTDOWN_S, CLOSE_S = 600.0, 10.0
STALL_AT_LEAST_S = 60.0  # a disk may need that long to flush its cache
SHARDS_STALL_S = 24 * 3600.0  # a rank reports only when it has written its part
Destination = LocalSink | Receiver


class SaveHandle:
    """A save in the background. If it fails and the user has not seen the error, the trainer's next call raises it."""

    def __init__(self, path: locations.Place, destination: Destination | ShardedSave) -> None:
        self.path, self._shown = locations.text_of(path), str(path)
        self._destination = destination
        self._future: Future[str] = destination.done
        self._seen = False

    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout: float | None = None) -> str:
        """Wait until the file is complete and return its path, or raise the error of the save."""
        self.exception(timeout)
        self._future.result()
        return self.path

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the save has ended and return its error, or None if it succeeded."""
        error = self._future.exception(timeout)
        self._seen = self._seen or error is not None
        return error

    def __repr__(self) -> str:
        state = "running" if not self.done() else "failed" if self._future.exception() else "done"
        return f"SaveHandle({self._shown!r}, {state})"


class Checkpoints:
    """Owns the saves that are still running. The workers, or files, have everything else. `on_saved` is called when a
    checkpoint is complete, by any thread."""

    def __init__(self, engine: Engine, on_saved: Callable[[], None]) -> None:
        self._engine, self._on_saved = engine, on_saved
        self._running: list[SaveHandle] = []

    # -- save -----------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], *, blocking: bool, sharded: bool) -> Any:
        where = locations.place_to_save(path)
        if sharded:
            return self._save_shards(where, blocking=blocking)
        locations.check_file(where)
        destination = self._destination(where)
        try:
            self._send_to(destination, blocking=blocking)
            if blocking:
                destination.done.result()
                self._on_saved()
                return locations.text_of(where)
        except BaseException as error:
            _abandon(destination, error)
            raise
        return self._handle(where, destination)

    def _handle(self, where: locations.Place, destination: Destination | ShardedSave) -> SaveHandle:
        handle = SaveHandle(where, destination)
        destination.done.add_done_callback(lambda done: None if done.exception() else self._on_saved())
        self._running.append(handle)
        return handle

    def _destination(self, path: locations.Place, *, report: bool = False) -> Destination:
        server = self._engine.group.checkpoint_server()
        if server is None:
            return LocalSink(path, report=report)
        stall_s = SHARDS_STALL_S if report else max(self._engine.limits.hang_s, STALL_AT_LEAST_S)
        return Receiver(path, server, stall_s=stall_s, report=report)

    def _send_to(self, destination: Destination, *, blocking: bool) -> None:
        arguments = {"sink": destination.sink, "ranks": self._random_states(), "blocking": blocking}
        try:
            self._run(replica_calls.save, arguments, needs_state=True, is_waiting=destination.moves)
        except CheckpointError:
            # If a worker failed after the last byte, another one repeated its call, and was rejected: the file is complete.
            if not destination.done.done() or destination.done.exception() is not None:
                raise
        destination.call_ended()

    def content(self) -> Any:
        """Return the complete checkpoint as bytes."""
        return self._run(replica_calls.checkpoint, {"ranks": self._random_states()}, needs_state=True)[0].data

    def raise_failed(self) -> None:
        """Raise the first error of a background save that the user has not seen."""
        failed = self._failed()
        self._running = [handle for handle in self._running if not handle.done() or handle in failed[1:]]
        for handle in failed[:1]:
            error = handle.exception()
            raise CheckpointError(f"the save to {handle._shown} in the background failed: {error}") from error

    def finish(self) -> None:
        """Wait up to 600 s for all running saves together, because the workers are about to end. `raise_failed` can raise only
        one error after that, so the others are logged here."""
        until = time.monotonic() + SHUTDOWN_S
        for handle in self._running:
            try:
                handle._future.exception(max(until - time.monotonic(), 0.0))
            except concurrent.futures.TimeoutError:
                self._log_abandoned(handle, f"it was not complete {SHUTDOWN_S:g} s after shutdown() was called")
        for handle in self._failed()[1:]:
            logger.error("the save to %s in the background failed: %s", handle._shown, handle.exception())

    def abandon(self) -> None:
        """Abandon running saves: the workers end now."""
        for handle in self._running:
            if not handle.done():
                self._log_abandoned(handle, "the trainer was shut down by force")

    @staticmethod
    def _log_abandoned(handle: SaveHandle, why: str) -> None:
        logger.error(
            "the save to %s in the background was abandoned: %s. An older file of that name is unchanged",
            handle._shown,
            why,
        )
        handle._destination.close(CheckpointError(f"the save was abandoned: {why}"))

    def _failed(self) -> list[SaveHandle]:
        return [handle for handle in self._running if handle.done() and handle._future.exception() and not handle._seen]

    def _save_shards(self, where: locations.Place, *, blocking: bool) -> Any:
        save = ShardedSave(where)

        def prepare() -> dict[str, Any]:
            return save.begin(0 if blocking else self._engine.world_size, self._destination)

        try:
            call = Call(replica_calls.save_shards, {"ranks": self._random_states()})
            written = self._engine.run(Job(call, prepare=prepare, needs_state=True))[-1].values
            if blocking:
                save.complete({name: entry for files in written for name, entry in files.items()})
                self._on_saved()
                return locations.text_of(where)
            save.complete_later()
        except BaseException as error:
            save.close(error)
            raise
        return self._handle(where, save)

    # -- load -----------------------------------------------------------------------------------------

    def load(self, path: str | os.PathLike[str], *, trusted: bool) -> None:
        where = locations.place(path)
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

    def _random_states(self) -> list[Any]:
        return self._run(replica_calls.random_state, {}, needs_state=True)

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


class ShardedSave:
    """Owns the draft to which ranks write their parts of a sharded checkpoint, and what tells when each has. The draft becomes the
    checkpoint when all parts are complete.

    At a URI, the draft is a folder in that of the checkpoint. It replaces an older one when its files are listed."""

    def __init__(self, where: locations.Place) -> None:
        self._where, self._target = where, locations.check_folder(where)
        self.done: Future[str] = Future()
        self._thread: threading.Thread | None = None
        self._draft: locations.Place | None = None
        self._parts: list[Destination] = []
        self._reports: tempfile.TemporaryDirectory[str] | None = None
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

    def begin(self, ranks: int, destination: Callable[..., Destination]) -> dict[str, Any]:
        """Return the arguments for the workers' call, whenever it is made: each time they write to a new draft, because ranks
        from before a failure may still be writing to the old one. `ranks` of them will report what they wrote later."""
        self._drop(CheckpointError("the workers' call is repeated"))
        name = f"{uuid.uuid4().hex[:8]}.tmp"
        if self._target is not None:  # absolute, because workers may run in another directory than the script
            self._draft = self._target.parent / f".{self._target.name}.{name}"
        elif remote.is_in_this_process(self._uri):
            self._draft = Path(tempfile.mkdtemp(prefix="raysgd-shards-")) / name[:8]
        else:
            self._draft = self._uri / name[:8]
        if isinstance(self._draft, Path):
            self._draft.mkdir(parents=True)
        self._reports = tempfile.TemporaryDirectory(prefix="raysgd-parts-") if ranks else None
        for rank in range(ranks):
            assert self._reports is not None
            self._parts.append(destination(Path(self._reports.name) / str(rank), report=True))
        return {"folder": self._draft, "sinks": [part.sink for part in self._parts]}

    @property
    def _uri(self) -> locations.Uri:
        assert isinstance(self._where, locations.Uri)
        return self._where

    def complete(self, files: shard_files.Files) -> None:
        """Let the draft become the checkpoint."""
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
        locations.log_saved(self._where)

    def complete_later(self) -> None:
        """Note that the workers' call has succeeded, and let a thread wait for what the ranks report."""
        for part in self._parts:
            part.call_ended()
        self._thread = threading.Thread(target=self._wait, name="raysgd-save", daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        try:
            files: shard_files.Files = {}
            for part in self._parts:
                reported = torch.load(part.done.result(), weights_only=True)
                files |= {name: FileEntry(*entry) for name, entry in reported.items()}
            self.complete(files)
        except BaseException as error:
            self._drop(error)
            self.done.set_exception(error)
        else:
            self._drop(CheckpointError("the save is complete"))
            self.done.set_result(locations.text_of(self._where))

    def close(self, error: BaseException) -> None:
        """Abandon the save, unless it is complete."""
        if self._thread is None:
            self._drop(error)
            return
        for part in self._parts:
            part.close(error)
        self._thread.join(CLOSE_S)

    def _drop(self, error: BaseException) -> None:
        """Delete the draft, if there is one."""
        draft, self._draft = self._draft, None
        for part in self._parts:
            part.close(error)
        self._parts.clear()
        if self._reports is not None:
            self._reports.cleanup()
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


def _abandon(destination: Destination, error: BaseException) -> None:
    """Close the destination after this error of the workers' call, or of waiting for the file. If the driver failed first,
    the worker only noticed that its connection broke; raise the driver's error then."""
    first = destination.done.exception() if destination.done.done() else None
    destination.close(CheckpointError(f"the save was abandoned: {described(error)}"))
    own = first is not None and not isinstance(first, FailedOnWorkerError)
    if own and first is not error and isinstance(error, Exception):
        raise first from error  # type: ignore[misc]


def _remove(folder: Path) -> None:
    """Delete the folder of a failed save, again and again, because ranks that do not know of the failure yet may still write
    to it."""
    for pause_s in (0.0, 0.1, 0.5, 2.0):
        time.sleep(pause_s)
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
    logger.warning("%s, of a save that failed, could not be deleted", folder)
