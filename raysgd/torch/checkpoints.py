"""A trainer's way to files and back, on the driver: checked before anything changes, complete or absent, in the
background where that is asked for."""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from raysgd import storage
from raysgd.engine.engine import Engine, Job
from raysgd.errors import CheckpointError, ConfigError, RemoteTraceback
from raysgd.torch import manifest, shard_files, states
from raysgd.torch.answers import Refused
from raysgd.torch.files import SeenFile, UnseenError, is_archive, readable, verified, verified_file
from raysgd.torch.streams import LocalSink, Receiver
from raysgd.workers.blob import Blob
from raysgd.workers.inline import InlineGroup

__all__ = ["Checkpoints", "SaveHandle"]

logger = logging.getLogger("raysgd")

SHUTDOWN_S = 600.0


class SaveHandle:
    """A save that goes on while training does. Its failure shows here, and in the trainer's next call."""

    def __init__(self, path: storage.Place, future: Future[str]) -> None:
        self.path = str(path)
        self._future = future
        self._seen = False

    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout: float | None = None) -> str:
        """Waits for the file to be complete; its path, or the error that kept it from being."""
        self._seen = self._seen or self._future.exception(timeout) is not None
        return self._future.result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits; the error, or None when all went well."""
        error = self._future.exception(timeout)
        self._seen = self._seen or error is not None
        return error

    def __repr__(self) -> str:
        state = "running" if not self.done() else "failed" if self._future.exception() else "done"
        return f"SaveHandle({self.path!r}, {state})"


class Checkpoints:
    """Owns the saves that are still running. Everything else is in the workers, or in files."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running: list[SaveHandle] = []

    def save(self, path: str | os.PathLike[str], *, blocking: bool, sharded: bool) -> Any:
        where = storage.place(path)
        if sharded:
            if isinstance(where, storage.Uri):
                raise ConfigError(
                    f"sharded=True writes from every worker, into a folder that all of them see: name a path, not {where}"
                )
            if not blocking:
                raise ConfigError("sharded=True writes from every worker at once and blocks: leave blocking=False out")
            return self._save_shards(where)
        way = self._way(where, again=blocking)
        try:
            self._engine.run(Job("save", {"sink": way.sink, "ranks": self._random_states(), "blocking": blocking}))
        except BaseException:
            way.close()
            raise
        if blocking:
            return way.done.result()
        handle = SaveHandle(where, way.done)
        self._running.append(handle)
        return handle

    def content(self) -> Any:
        """The whole checkpoint as bytes."""
        return self._engine.run(Job("checkpoint", {"ranks": self._random_states()}))[-1].values[0].data

    def load(self, path: str | os.PathLike[str], *, trusted: bool) -> None:
        where = storage.place(path)
        try:
            with readable():
                folder = where if isinstance(where, Path) and where.is_dir() else None
            sealed = (
                self._load_file(where, trusted=trusted)
                if folder is None
                else self._load_shards(folder, trusted=trusted)
            )
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
        if not sealed:
            logger.warning(
                "%s was loaded, but it has no digest, so nobody can tell whether it is damaged: an older version wrote it. "
                "Save it again with save() to give it one",
                path,
            )

    def _load_file(self, where: storage.Place, *, trusted: bool) -> bool:
        """Return whether it has a digest."""
        if isinstance(where, Path):
            file, sealed = verified_file(where, trusted=trusted)
            if is_archive(where) and self._load_in_workers(file, sealed=sealed, trusted=trusted):
                return sealed
        data = storage.read(where)
        sealed = verified(data, trusted=trusted)
        self.restore(data, trusted=trusted, sealed=sealed)
        return sealed

    def _load_in_workers(self, file: SeenFile, *, sealed: bool, trusted: bool) -> bool:
        """Every worker reads it where it lies; False when one of them cannot."""
        outline = states.outline(file, trusted=trusted)
        if outline is None or not file.here:
            return False
        states.check_sealed(outline, sealed=sealed)
        try:
            self._take({"file": file, "trusted": trusted}, kind="_file")
        except UnseenError:
            return False
        return True

    def restore(self, data: Any, *, trusted: bool, sealed: bool = True) -> None:
        # What is damaged or foreign never reaches a worker.
        states.check_sealed(states.parse(data, trusted=trusted), sealed=sealed)
        self._take({"data": Blob(data), "trusted": trusted})

    def raise_failed(self) -> None:
        """The error of a background save that failed and that nobody has looked at."""
        failed = self._failed()
        self._running = [handle for handle in self._running if not handle.done() or handle in failed[1:]]
        for handle in failed[:1]:
            error = handle.exception()
            raise CheckpointError(f"the save to {handle.path} in the background failed: {error}") from error

    def finish(self) -> None:
        """Waits for what still runs, as the workers are about to end. Only one failure can be raised after that: the
        others are said here."""
        for handle in self._running:
            handle._future.exception(SHUTDOWN_S)
        for handle in self._failed()[1:]:
            logger.error("the save to %s in the background failed: %s", handle.path, handle.exception())

    def _failed(self) -> list[SaveHandle]:
        return [handle for handle in self._running if handle.done() and handle._future.exception() and not handle._seen]

    # -- in parts -------------------------------------------------------------------------------------

    def _save_shards(self, target: Path) -> str:
        # Workers may run in another directory than the script.
        draft = target.parent.absolute() / f".{target.name}.{uuid.uuid4().hex[:8]}.tmp"
        draft.mkdir(parents=True)
        try:
            job = Job("save_shards", {"folder": str(draft), "ranks": self._random_states()})
            written = self._engine.run(job)[-1].values
            manifest.write(draft, {name: known for files in written for name, known in files.items()})
            if target.exists():
                old = draft.with_suffix(".old")
                os.replace(target, old)
                os.replace(draft, target)
                shutil.rmtree(old)
            else:
                os.replace(draft, target)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        return str(target)

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
            self._ask("verify_shards", {**place, "files": files})
        self._take(place, kind="_shards")
        return files is not None

    def _take(self, given: dict[str, Any], kind: str = "") -> None:
        """Checked on every rank before any of them changes."""
        self._ask(f"check{kind}", given)
        with self._engine.state_replaced_by_hand():
            # Counted here: the same number for all, also for one that has taken this load before, in a first try.
            self._ask(f"restore{kind}", {**given, "loads": self._engine.progress.loads + 1})

    def _ask(self, method: str, given: dict[str, Any]) -> None:
        """Ask all ranks; raise what one of them refuses."""
        refused = [value for value in self._engine.run(Job(method, given))[-1].values if isinstance(value, Refused)]
        if any(value.unseen for value in refused):
            raise UnseenError
        if refused:
            raise CheckpointError(refused[0].why) from RemoteTraceback(refused[0].trace)

    def _random_states(self) -> list[Any]:
        return self._engine.run(Job("random_state"))[-1].values

    def _way(self, path: storage.Place, *, again: bool) -> LocalSink | Receiver:
        if isinstance(self._engine.group, InlineGroup):
            return LocalSink(path)
        from raysgd.workers.cluster import driver_address

        return Receiver(path, driver_address(), again=again)
