"""A trainer's way to files and back, on the driver: checked before anything changes, complete or absent, in the
background where that is asked for."""

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
from raysgd.torch.checkpoint import manifest, shard_files, states
from raysgd.torch.checkpoint.files import SeenFile, UnseenError, is_archive, readable, verified, verified_file
from raysgd.torch.checkpoint.receiver import FailedOnWorkerError, Receiver
from raysgd.torch.checkpoint.shard_files import is_replaceable
from raysgd.torch.checkpoint.streaming import LocalSink
from raysgd.workers.blob import Blob
from raysgd.workers.inline_group import InlineGroup

__all__ = ["Checkpoints", "SaveHandle"]

logger = logging.getLogger("raysgd")

SHUTDOWN_S = 600.0
STALL_AT_LEAST_S = 60.0  # a disk may need that long for what it was given
Destination = LocalSink | Receiver


class SaveHandle:
    """A save that goes on while training does. Its failure shows here, and in the trainer's next call."""

    def __init__(self, path: locations.Place, destination: Destination) -> None:
        self.path, self._shown = locations.text_of(path), str(path)
        self._destination = destination
        self._future: Future[str] = destination.done
        self._seen = False

    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout: float | None = None) -> str:
        """Waits for the file to be complete; its path, or the error that kept it from being."""
        self._seen = self._seen or self._future.exception(timeout) is not None
        self._future.result()
        return self.path

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits; the error, or None when all went well."""
        error = self._future.exception(timeout)
        self._seen = self._seen or error is not None
        return error

    def __repr__(self) -> str:
        state = "running" if not self.done() else "failed" if self._future.exception() else "done"
        return f"SaveHandle({self._shown!r}, {state})"


class Checkpoints:
    """Owns the saves that are still running. Everything else is in the workers, or in files."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running: list[SaveHandle] = []

    def save(self, path: str | os.PathLike[str], *, blocking: bool, sharded: bool) -> Any:
        where = locations.place(path)
        if sharded:
            if isinstance(where, locations.Uri):
                raise ConfigError(
                    f"sharded=True writes from every worker, into a folder that all of them see: name a path, not {where}"
                )
            if not blocking:
                raise ConfigError("sharded=True writes from every worker at once and blocks: leave blocking=False out")
            return self._save_shards(where)
        locations.check_file(where)
        destination = self._destination(where)
        try:
            arguments = {"sink": destination.sink, "ranks": self._random_states(), "blocking": blocking}
            try:
                self._engine.run(Job(Call(replica_calls.save, arguments)))
            except CheckpointError:
                # A worker that failed after the last byte has one that repeats its call, and is refused.
                if not destination.done.done() or destination.done.exception() is not None:
                    raise
            destination.call_ended()
            if blocking:
                destination.done.result()
                return locations.text_of(where)
        except BaseException as error:
            _give_up(destination, error)
            raise
        handle = SaveHandle(where, destination)
        self._running.append(handle)
        return handle

    def content(self) -> Any:
        """The whole checkpoint as bytes."""
        return (
            self._engine.run(Job(Call(replica_calls.checkpoint, {"ranks": self._random_states()})))[-1].values[0].data
        )

    def load(self, path: str | os.PathLike[str], *, trusted: bool) -> None:
        where = locations.place(path)
        try:
            with readable():
                folder = where if isinstance(where, Path) and where.is_dir() else None
            sealed = (
                self._load_file(where, trusted=trusted)
                if folder is None
                else self._load_shards(folder, trusted=trusted)
            )
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}") from error
        if not sealed:
            logger.warning(
                "%s was loaded, but it has no digest, so nobody can tell whether it is damaged: an older version wrote it. "
                "Save it again with save() to give it one",
                where,
            )

    def _load_file(self, where: locations.Place, *, trusted: bool) -> bool:
        """Return whether it has a digest."""
        if isinstance(where, Path):
            file, sealed = verified_file(where, trusted=trusted)
            if is_archive(where) and self._load_in_workers(file, trusted=trusted):
                return sealed
        data = locations.read(where)
        sealed = verified(data, trusted=trusted)
        self.restore(data, trusted=trusted)
        return sealed

    def _load_in_workers(self, file: SeenFile, *, trusted: bool) -> bool:
        """Every worker reads it where it lies; False when one of them cannot."""
        outline = states.outline(file, trusted=trusted)
        if outline is None or not file.here:
            return False
        try:
            self._take(replica_calls.check_file, replica_calls.restore_file, {"file": file, "trusted": trusted})
        except UnseenError:
            return False
        return True

    def restore(self, data: Any, *, trusted: bool) -> None:
        states.parse(data, trusted=trusted)  # what is damaged or foreign never reaches a worker
        self._take(replica_calls.check, replica_calls.restore, {"data": Blob(data), "trusted": trusted})

    def raise_failed(self) -> None:
        """The error of a background save that failed and that nobody has looked at."""
        failed = self._failed()
        self._running = [handle for handle in self._running if not handle.done() or handle in failed[1:]]
        for handle in failed[:1]:
            error = handle.exception()
            raise CheckpointError(f"the save to {handle._shown} in the background failed: {error}") from error

    def finish(self) -> None:
        """Waits for what still runs, as the workers are about to end: 600 s for all together. Only one failure can be raised
        after that: the others are said here."""
        until = time.monotonic() + SHUTDOWN_S
        for handle in self._running:
            try:
                handle._future.exception(max(until - time.monotonic(), 0.0))
            except concurrent.futures.TimeoutError:
                self._abandon(handle, f"it was not complete {SHUTDOWN_S:g} s after shutdown() was called")
        for handle in self._failed()[1:]:
            logger.error("the save to %s in the background failed: %s", handle._shown, handle.exception())

    def abandon(self) -> None:
        """Gives up what still runs, as the workers end now."""
        for handle in self._running:
            if not handle.done():
                self._abandon(handle, "the trainer was shut down by force")

    @staticmethod
    def _abandon(handle: SaveHandle, why: str) -> None:
        logger.error(
            "the save to %s in the background was given up: %s. A file that was there before is unharmed",
            handle._shown,
            why,
        )
        handle._destination.close(CheckpointError(f"the save was given up: {why}"))

    def _failed(self) -> list[SaveHandle]:
        return [handle for handle in self._running if handle.done() and handle._future.exception() and not handle._seen]

    # -- in parts -------------------------------------------------------------------------------------

    def _save_shards(self, where: Path) -> str:
        target = locations.check_folder(where)
        assert target is not None
        if os.path.lexists(target) and not is_replaceable(target):
            raise ConfigError(
                f"{where} is there already, and holds something else: save(sharded=True) replaces a directory that it wrote "
                "before, or an empty one; name one of those, or one that does not exist yet"
            )
        # Workers may run in another directory than the script.
        draft = target.parent.absolute() / f".{target.name}.{uuid.uuid4().hex[:8]}.tmp"
        draft.mkdir(parents=True)
        try:
            call = Call(replica_calls.save_shards, {"folder": str(draft), "ranks": self._random_states()})
            written = self._engine.run(Job(call))[-1].values
            manifest.write(draft, {name: known for files in written for name, known in files.items()})
            locations.put_folder(draft, target)
        except BaseException:
            _remove(draft)
            raise
        return str(where)

    def _load_shards(self, folder: Path, *, trusted: bool) -> bool:
        """Return whether it has digests."""
        if not trusted:
            raise CheckpointError(
                "this is a directory, as save(sharded=True) writes it: torch keeps a pickled index in it, and reading "
                "that can run code. If you made it yourself, pass trusted=True"
            )
        with readable():
            files = manifest.read(folder)
        if files is None and not shard_files.is_without_manifest(folder):
            raise CheckpointError(
                f"this is no whole checkpoint in parts: {manifest.NAME}, which lists its files, is missing"
            )
        place = {"folder": str(folder.absolute())}
        if files is not None:
            self._ask(replica_calls.verify_shards, {**place, "files": files})
        self._take(replica_calls.check_shards, replica_calls.restore_shards, place)
        return files is not None

    def _take(self, check: Callable[..., Any], restore: Callable[..., Any], given: dict[str, Any]) -> None:
        """Check a state on every rank before any of them changes; then let all take it."""
        self._ask(check, given)
        with self._engine.state_replaced_by_hand():
            # Counted here: the same number for all, also for one that has taken this load before, in a first try.
            self._ask(restore, {**given, "loads": self._engine.progress.loads + 1})

    def _ask(self, method: Callable[..., Any], given: dict[str, Any]) -> None:
        """Ask all ranks; raise what one of them refuses."""
        values = self._engine.run(Job(Call(method, given)))[-1].values
        refused = [value for value in values if isinstance(value, replica_calls.Refusal)]
        if any(value.unseen for value in refused):
            raise UnseenError
        if refused:
            raise CheckpointError(refused[0].why) from RemoteTraceback(refused[0].trace)

    def _random_states(self) -> list[Any]:
        return self._engine.run(Job(Call(replica_calls.random_state)))[-1].values

    def _destination(self, path: locations.Place) -> Destination:
        if isinstance(self._engine.group, InlineGroup):
            return LocalSink(path)
        from raysgd.workers.ray_group import RayGroup

        assert isinstance(self._engine.group, RayGroup)
        return Receiver(path, self._engine.group.control, stall_s=max(self._engine.limits.hang_s, STALL_AT_LEAST_S))


def _give_up(destination: Destination, error: BaseException) -> None:
    """The workers' call, or the wait for the file, has ended in this error. Where the driver has failed first, of which its
    worker knows nothing but that the connection broke, that error is raised."""
    first = destination.done.exception() if destination.done.done() else None
    destination.close(CheckpointError(f"the save was given up: {type(error).__name__}: {error}"))
    own = first is not None and not isinstance(first, FailedOnWorkerError)
    if own and first is not error and isinstance(error, Exception):
        raise first from error  # type: ignore[misc]


def _remove(folder: Path) -> None:
    """Ranks that have not heard yet that the save has failed may write a little more."""
    for pause_s in (0.0, 0.1, 0.5, 2.0):
        time.sleep(pause_s)
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
    logger.warning("%s, of a save that failed, could not be deleted", folder)
