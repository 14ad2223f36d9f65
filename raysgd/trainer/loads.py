"""Load a trainer's state from a file: it is verified, all workers check it, and then all load it.
Driver."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from raysgd.core.channel.blobs import Blob
from raysgd.core.measures.progress import Progress
from raysgd.core.protocols import Call
from raysgd.core.snapshot import Ask, Snapshot
from raysgd.engine.call import Job
from raysgd.engine.engine import Engine
from raysgd.engine.failure import UNDEFINED
from raysgd.errors import CheckpointError, RemoteTraceback
from raysgd.replica import loading
from raysgd.storage import checksums, locations, remote
from raysgd.storage.remote import Uri
from raysgd.storage.seen import SeenFile, UnseenError, kept_open, readable, verified_file
from raysgd.trainer.within_call import Contents

logger = logging.getLogger("raysgd")

Take = Callable[[Callable[..., Any], dict[str, Any]], None]  # call a replica's function on all ranks
Again = Callable[[Take], Any]  # load a state with it


class DrawnAnew:
    """Says once in a run without a `seed` that random numbers do not continue: when it trains."""

    def __init__(self, seed: int | None) -> None:
        self._said, self._why = seed is not None, ""

    def note(self, why: str) -> None:
        self._why = self._why or why

    def say(self) -> None:
        if self._why and not self._said:
            self._said = True
            logger.warning(
                "this run has no seed=, so dropout, augmentation, and shuffling without a generator of the loader's own draw other random "
                "numbers from here on (%s)",
                self._why,
            )


class Loads:
    """Lets the workers load states."""

    def __init__(self, engine: Engine, drawn_anew: DrawnAnew) -> None:
        self._engine, self._drawn_anew = engine, drawn_anew
        self._unsaved: Any = None  # what the checkpoint of the newest load does not have

    def load(self, path: str | os.PathLike[str], *, trusted: bool = False) -> None:
        copy = self._load(path, self.take, trusted=trusted)
        where = locations.place(path)
        where = where.absolute() if isinstance(where, Path) else where
        self._loaded(partial(self._load, where, trusted=trusted), where, copy)

    def restore(self, data: Any, *, trusted: bool = False) -> None:
        self._restore(data, self.take, trusted=trusted)
        self._loaded(partial(self._restore, data, trusted=trusted))

    def _loaded(self, again: Again, where: locations.Place | None = None, copy: Again | None = None) -> None:
        """Note that all ranks have loaded a state, which this loads again, from a place if it is
        not in memory. With a `copy` of it, that loads it, whatever is there then."""
        self._engine.calls.keep_load(self._snapshot(copy or again, self._engine.calls.changes, unsaved=self._unsaved))

    def _snapshot(
        self,
        again: Again,
        loads: int | None,
        *,
        at: Progress | None = None,
        workers: int = 0,
        unsaved: Any = None,
    ) -> Snapshot:
        """Make a snapshot of the present state, or of that of another place, which the ranks of a
        new generation load."""
        at, workers = at or self._engine.calls.progress, workers or self._engine.world_size

        def load(ask: Ask) -> bool:
            def take(method: Callable[..., Any], arguments: dict[str, Any]) -> None:
                parameters = {
                    "method": method,
                    "arguments": arguments,
                    "workers": workers,
                    "loads": loads,
                    "unsaved": unsaved,
                }
                values = ask(Call(loading.load_again, parameters))
                if values is None:
                    raise _RankFailed
                raise_refused(values, "Training cannot continue from it")

            try:
                again(take)
            except _RankFailed:
                return False
            except CheckpointError as error:
                raise CheckpointError(
                    f"the workers have changed, and the checkpoint from which training would continue cannot be loaded: {error}. "
                    "Create a new trainer, and load another checkpoint"
                ) from error
            return True

        return Snapshot(progress=at, call=at.call, load=load)

    def _load(self, path: str | os.PathLike[str] | Uri, take: Take, *, trusted: bool) -> Again | None:
        """Return what loads it again, whatever is there then; None for a folder."""
        where = locations.usable_place(path)
        if isinstance(where, Uri):
            remote.check_scheme(where)
        try:
            with readable():
                is_folder = where.is_dir()
            if not is_folder:
                return self._load_file(where, take, trusted=trusted)
            self._load_folder(where, take, trusted=trusted)
        except CheckpointError as error:
            raise CheckpointError(str(error) if str(where) in str(error) else f"{where}: {error}") from error
        return None

    def _load_folder(self, folder: locations.Place, take: Take, *, trusted: bool) -> None:
        raise CheckpointError("it is a directory: pass load() the file that save() wrote")

    def _restore(self, data: Any, take: Take, *, trusted: bool) -> None:
        take(loading.restore, {"source": Blob(data), "trusted": trusted})

    def _load_file(self, where: locations.Place, take: Take, *, trusted: bool) -> Again:
        """Let the workers read the file themselves, if they all see it. Return what loads it
        again."""
        if isinstance(where, Path):
            file = kept_open(where)
            seen, _ = verified_file(file, where)
            if seen is not None:
                try:
                    take(loading.restore, {"source": seen, "trusted": trusted})
                    return partial(self._restore_file, file, seen, trusted=trusted)
                except UnseenError:
                    logger.debug("a worker does not see %s, or cannot read it, so the driver sends its content", where)
        data = locations.read(where)
        checksums.verify(data)
        self._restore(data, take, trusted=trusted)
        return partial(self._restore, data, trusted=trusted)

    def _restore_file(self, file: BinaryIO, seen: SeenFile, take: Take, *, trusted: bool) -> None:
        with readable():
            if SeenFile.of(file, Path(seen.path)) != seen:
                raise CheckpointError(f"{seen.path} was changed since it was loaded")
            file.seek(0)
            data = file.read()
        self._restore(data, take, trusted=trusted)

    def saves(self, path: str, contents: Contents | None = None) -> None:
        """Note that the present state is being saved as an automatic checkpoint, or that one within
        a call, of these `contents`, is complete."""

    def take(self, method: Callable[..., Any], arguments: dict[str, Any]) -> None:
        """Load a state on all ranks. If one of them refuses it, none loads it, and the reason is
        raised. If it fails later, the error says that the state is undefined."""
        engine = self._engine
        # Counted here, so that a rank that loaded this state before the call was repeated has the same number as others, and that
        # it grows if the state of all ranks is undefined, and has none.
        loads = engine.calls.changes = max(engine.calls.changes, engine.calls.progress.loads) + 1
        with engine.calls.state_replaced_by_hand(loads):
            values = engine.calls.run(Job(Call(method, {**arguments, "loads": loads}), replaces=True))[-1].values
            raise_refused(values, f"Now {UNDEFINED}" if engine.calls.undefined else "Nothing was changed on any rank")
        self._unsaved = values[0] if values else None
        self._drawn_anew.note("a state was loaded")


class _RankFailed(Exception):
    """A rank has failed while it loaded a checkpoint."""


def raise_refused(values: Sequence[Any], consequence: str) -> None:
    """Raise the reason if a rank has refused to load a state. `values` are those of all ranks."""
    refused = [(rank, each) for rank, each in enumerate(values) if isinstance(each, loading.Refusal) and each.why]
    if any(each.unseen for _, each in refused):
        raise UnseenError
    for rank, each in refused:
        on = f"rank {rank}: " if len(values) > 1 else ""
        raise CheckpointError(f"{on}{each.why}. {consequence}") from RemoteTraceback(each.trace)
