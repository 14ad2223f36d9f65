"""Load a trainer's state from a file: it is verified, and all workers load it, or none of them.
Driver."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from raysgd.core.protocols import Call
from raysgd.engine.call import Job
from raysgd.engine.engine import Engine
from raysgd.errors import CheckpointError, RemoteTraceback
from raysgd.storage import checksums, locations, remote
from raysgd.storage.remote import Uri
from raysgd.storage.seen import SeenFile, UnseenError, readable, verified_file
from raysgd.training import loading
from raysgd.training.position import at_its_epoch
from raysgd.workers.calls import Blob

logger = logging.getLogger("raysgd")


class Loads:
    """Lets the workers load states. `read` returns the state in an open file, and `pack` returns a
    state as a worker's snapshot has it."""

    def __init__(
        self,
        engine: Engine,
        read: Callable[[BinaryIO], dict[str, Any]],
        pack: Callable[[dict[str, Any]], Any],
    ) -> None:
        self._engine, self._read, self._pack = engine, read, pack
        self._count = 0  # the number of the newest load

    def load(self, path: str | os.PathLike[str], *, trusted: bool = False) -> None:
        where = locations.place_to_load(path)
        if isinstance(where, Uri):
            remote.check_scheme(where)
        has_checksums = True  # a folder has digests
        try:
            with readable():
                is_folder = where.is_dir()
            if is_folder:
                self._load_folder(where, trusted=trusted)
            else:
                has_checksums = self._load_file(where, trusted=trusted)
        except CheckpointError as error:
            raise CheckpointError(str(error) if str(where) in str(error) else f"{where}: {error}") from error
        if not has_checksums:
            locations.warn_without_checksums(where)

    def _load_folder(self, folder: locations.Place, *, trusted: bool) -> None:
        raise CheckpointError("it is a directory: pass load() the file that save() wrote")

    def restore(self, data: Any, *, trusted: bool = False) -> None:
        self.take(loading.restore, {"source": Blob(data), "trusted": trusted})

    def _load_file(self, where: locations.Place, *, trusted: bool) -> bool:
        """Let the workers read the file themselves, if they all see it. Return whether it has
        checksums."""
        if isinstance(where, Path):
            file, has_checksums = verified_file(where)
            if file is not None:
                try:
                    # A file without checksums could change unnoticed, and only workers read one that may contain code.
                    keep = has_checksums and not trusted and self._engine.keeps_snapshots
                    loaded = _LoadedFile(file, self._read, self._pack) if keep else None
                    self.take(loading.restore, {"source": file, "trusted": trusted, "kept": keep}, loaded)
                    return has_checksums
                except UnseenError:
                    logger.debug("a worker does not see %s, or cannot read it, so the driver sends its content", where)
        data = locations.read(where)
        has_checksums = checksums.verify(data)
        self.restore(data, trusted=trusted)
        return has_checksums

    def take(self, method: Callable[..., Any], arguments: dict[str, Any], loaded: _LoadedFile | None = None) -> None:
        """Load a state on all ranks. If one of them refuses it, none loads it, and the reason is
        raised. Keep the file that was `loaded`, if there is one, for new workers."""
        engine = self._engine
        # Counted here, so that a rank that loaded this state before the call was repeated has the same number as others, and that
        # it grows if all ranks are half loaded, which have none.
        loads = self._count = max(self._count, engine.progress.loads) + 1
        with engine.state_replaced_by_hand(loads):
            values = engine.run(Job(Call(method, {**arguments, "loads": loads})))[-1].values
            refused = [
                (rank, each) for rank, each in enumerate(values) if isinstance(each, loading.Refusal) and each.why
            ]
            if any(each.unseen for _, each in refused):
                raise UnseenError
            for rank, each in refused:
                on = f"rank {rank}: " if len(values) > 1 else ""
                raise CheckpointError(f"{on}{each.why}. Nothing was changed on any rank") from RemoteTraceback(
                    each.trace
                )
            if loaded is not None:
                engine.keep_state(partial(loaded.state, loads, engine.world_size))


class _LoadedFile:
    """Keeps a checkpoint that the workers load open: if they all fail before there is a snapshot,
    new workers start from it. The file may be renamed or removed meanwhile, but not changed."""

    def __init__(self, file: SeenFile, read: Callable[[BinaryIO], dict[str, Any]], pack: Callable[..., Any]) -> None:
        self._loaded, self._read, self._pack = file, read, pack
        with file.opened() as content:
            self._descriptor = os.dup(content.fileno())
        weakref.finalize(self, os.close, self._descriptor)

    def state(self, loads: int, world_size: int) -> Any:
        """Return the content as a worker's snapshot would have been after the load. `loads` is how
        often the user has loaded a state, and `world_size` how many workers there were. Raise
        CheckpointError if the file has changed."""
        try:
            with os.fdopen(os.dup(self._descriptor), "rb") as file:
                if SeenFile.of(file, Path(self._loaded.path)) != self._loaded:
                    raise CheckpointError("the file has changed since")
                checksums.verify(file)
                file.seek(0)
                state = at_its_epoch(self._read(file))
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
        return self._pack(state)
