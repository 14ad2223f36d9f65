"""Save a trainer's state to files and load it: each file is complete or absent, and is checked before it is loaded. Driver."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from raysgd.core.protocols import Call
from raysgd.engine.engine import Engine, Job
from raysgd.errors import CheckpointError, ConfigError, RemoteTraceback
from raysgd.storage import locations
from raysgd.torch import replica_calls
from raysgd.torch.checkpoint import shard_files
from raysgd.torch.checkpoint.files import UnseenError, readable, verified, verified_file
from raysgd.torch.checkpoint.receiver import FailedOnWorkerError, Receiver
from raysgd.torch.checkpoint.streaming import LocalSink
from raysgd.workers.blob import Blob

__all__ = ["Checkpoints", "SaveHandle"]

logger = logging.getLogger("raysgd")

SHUTDOWN_S = 600.0
STALL_AT_LEAST_S = 60.0  # a disk may need that long to flush its cache
Destination = LocalSink | Receiver


class SaveHandle:
    """A save in the background. If it fails and the user has not seen the error, the trainer's next call raises it."""

    def __init__(self, path: locations.Place, destination: Destination) -> None:
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
    """Owns the saves that are still running. The workers, or files, have everything else."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running: list[SaveHandle] = []

    # -- save -----------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str], *, blocking: bool, sharded: bool) -> Any:
        where = locations.place_to_save(path)
        if sharded:
            if isinstance(where, locations.Uri):
                raise ConfigError(
                    f"sharded=True writes from every worker, to a folder that all of them see: name a path, not {where}"
                )
            if not blocking:
                raise ConfigError("sharded=True writes from every worker and blocks: remove blocking=False")
            return self._save_shards(where)
        locations.check_file(where)
        destination = self._destination(where)
        try:
            self._send_to(destination, blocking=blocking)
            if blocking:
                destination.done.result()
                return locations.text_of(where)
        except BaseException as error:
            _abandon(destination, error)
            raise
        handle = SaveHandle(where, destination)
        self._running.append(handle)
        return handle

    def _destination(self, path: locations.Place) -> Destination:
        server = self._engine.group.checkpoint_server()
        if server is None:
            return LocalSink(path)
        return Receiver(path, server, stall_s=max(self._engine.limits.hang_s, STALL_AT_LEAST_S))

    def _send_to(self, destination: Destination, *, blocking: bool) -> None:
        arguments = {"sink": destination.sink, "ranks": self._random_states(), "blocking": blocking}
        try:
            self._run(replica_calls.save, arguments)
        except CheckpointError:
            # If a worker failed after the last byte, another one repeated its call, and was rejected: the file is complete.
            if not destination.done.done() or destination.done.exception() is not None:
                raise
        destination.call_ended()

    def content(self) -> Any:
        """Return the complete checkpoint as bytes."""
        return self._run(replica_calls.checkpoint, {"ranks": self._random_states()})[0].data

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

    def _save_shards(self, where: Path) -> str:
        target = locations.check_folder(where)
        assert target is not None
        if os.path.lexists(target) and not shard_files.is_replaceable(target):
            raise ConfigError(
                f"{where} exists and contains something else: save(sharded=True) replaces only an empty directory or a sharded "
                "checkpoint; name one of those, or a directory that does not exist"
            )
        # The path is absolute, because workers may run in another directory than the script.
        draft = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.tmp"
        draft.mkdir(parents=True)
        try:
            written = self._run(replica_calls.save_shards, {"folder": str(draft), "ranks": self._random_states()})
            shard_files.write_manifest(draft, {name: entry for files in written for name, entry in files.items()})
            locations.put_folder(draft, target)
            locations.log_saved(where)
        except BaseException:
            _remove(draft)
            raise
        return str(where)

    # -- load -----------------------------------------------------------------------------------------

    def load(self, path: str | os.PathLike[str], *, trusted: bool) -> None:
        where = locations.place(path)
        try:
            with readable():
                is_folder = isinstance(where, Path) and where.is_dir()
            load = self._load_shards if is_folder else self._load_file
            sealed = load(where, trusted=trusted)
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}") from error
        if not sealed:
            locations.warn_without_digest(where)

    def restore(self, data: Any, *, trusted: bool) -> None:
        """Send a checkpoint to the workers, which check it and load it."""
        self._take(replica_calls.restore, {"source": Blob(data), "trusted": trusted})

    def _load_file(self, where: locations.Place, *, trusted: bool) -> bool:
        """Let the workers read the file themselves, if they all see it. Return whether it has a digest."""
        if isinstance(where, Path):
            file, sealed = verified_file(where, trusted=trusted)
            if file is not None:
                try:
                    self._take(replica_calls.restore, {"source": file, "trusted": trusted})
                    return sealed
                except UnseenError:
                    logger.debug("a worker does not see %s, or cannot read it, so the driver sends its content", where)
        data = locations.read(where)
        sealed = verified(data, trusted=trusted)
        self.restore(data, trusted=trusted)
        return sealed

    def _load_shards(self, folder: Any, *, trusted: bool) -> bool:
        """Return whether the folder has digests."""
        if not trusted:
            raise CheckpointError(
                "this is a directory, as save(sharded=True) writes it: torch keeps a pickled index in it, and reading "
                "that can run code. If you trust its author, pass trusted=True"
            )
        with readable():
            files = shard_files.read_manifest(folder)
        self._take(replica_calls.restore_shards, {"folder": str(folder.absolute()), "files": files or {}})
        return files is not None

    def _take(self, restore: Callable[..., Any], arguments: dict[str, Any]) -> None:
        """Load a state on all ranks. If one of them refuses it, none loads it, and the reason is raised."""
        with self._engine.state_replaced_by_hand():
            # Counted here, so that a rank that loaded this state before the call was repeated has the same number as others.
            values = self._run(restore, {**arguments, "loads": self._engine.progress.loads + 1})
            refused = [value for value in values if isinstance(value, replica_calls.Refusal)]
            if any(value.unseen for value in refused):
                raise UnseenError
            if refused:
                raise CheckpointError(refused[0].why) from RemoteTraceback(refused[0].trace)

    def _random_states(self) -> list[Any]:
        return self._run(replica_calls.random_state, {})

    def _run(self, method: Callable[..., Any], arguments: dict[str, Any]) -> list[Any]:
        return self._engine.run(Job(Call(method, arguments)))[-1].values


def _abandon(destination: Destination, error: BaseException) -> None:
    """Close the destination after this error of the workers' call, or of waiting for the file. If the driver failed first,
    the worker only noticed that its connection broke; raise the driver's error then."""
    first = destination.done.exception() if destination.done.done() else None
    destination.close(CheckpointError(f"the save was abandoned: {type(error).__name__}: {error}"))
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
