"""Automatic checkpoints: when they are made, which of them stay, and which one a restarted script
takes. Driver."""

from __future__ import annotations

import logging
import math
import os
import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from raysgd.callbacks.base import Callback
from raysgd.callbacks.early_stopping import EarlyStopping, warn_of_mode
from raysgd.callbacks.writers import ROW_FIELDS, for_json
from raysgd.config import at_least, is_real, one_of
from raysgd.core.measures.metrics import Measured, WeightedMean, cost
from raysgd.errors import CheckpointError, ConfigError, suggesting_fields
from raysgd.storage import checksums, folders, locations
from raysgd.storage.claims import FolderClaim

logger = logging.getLogger("raysgd")

NAME = re.compile(r"loop(\d+)-epoch(\d+)-step(\d+)")
DRAFT = re.compile(rf"\.{NAME.pattern}\.\w+\.[0-9a-f]{{8}}\.tmp")
RECORD = ".json"  # written after the checkpoint: a checkpoint without its record is incomplete, and is never loaded
RELEASE_S = 5.0  # how long a shutdown by force waits for a record that is being written
LISTED = 3  # files in a message


@suggesting_fields
@dataclass(frozen=True, kw_only=True)
class AutoCheckpoint:
    """Makes checkpoints in the loop over `trainer.epochs()`, and in `trainer.fit()`, in the
    background.

        TorchTrainer(..., checkpoints=AutoCheckpoint(path="runs/first", best="val_loss"), resume="auto")

    path     the folder of the checkpoints: a path, or a URI such as "s3://bucket/run"
    every    "epoch": after each pass of the loop; a number of batches, or seconds as a float: also
             within an epoch
    keep     how many of the newest checkpoints stay; None: all
    best     the metric whose best checkpoint stays, too
    mode     "min" or "max": which values of this metric are better
    trusted  resume="auto" may load objects of your own types, which can run code
             (`load(trusted=True)`)
    """

    path: str | os.PathLike[str]
    every: Literal["epoch"] | int | float = "epoch"
    keep: int | None = 3
    best: str | None = None
    mode: Literal["min", "max"] = "min"
    trusted: bool = False

    def __post_init__(self) -> None:
        locations.place(self.path)  # raises ConfigError for anything that is neither a path nor a URI
        if self.every != "epoch" and not (is_real(self.every) and self.every > 0):
            raise ConfigError(
                f"every must be 'epoch', a whole number of batches, or seconds as a float, got {self.every!r}"
            )
        if self.keep is not None:
            at_least("keep", self.keep, 1, whole=True)
        if self.best is not None and not isinstance(self.best, str):
            raise ConfigError(f"best must be the name of a metric such as 'val_loss', or None, got {self.best!r}")
        one_of("mode", self.mode, "min", "max")
        if self.best is not None:
            warn_of_mode(f"AutoCheckpoint(best={self.best!r}) keeps the checkpoint with", self.best, self.mode)
        if not isinstance(self.trusted, bool):
            raise ConfigError(f"trusted must be True or False, got {self.trusted!r}")


def wanted_metrics(callbacks: Sequence[Callback], checkpoints: AutoCheckpoint | None) -> dict[str, str]:
    """The metrics that operators must measure, and which argument names each. None are known if a
    user's callback adds some."""
    if any(type(each).extra_metrics is not Callback.extra_metrics for each in callbacks):
        return {}
    best = None if checkpoints is None else checkpoints.best
    stops = [each._metric for each in callbacks if isinstance(each, EarlyStopping)]
    named = {best: f"AutoCheckpoint(best={best!r})"} | {each: f"EarlyStopping({each!r})" for each in stops}
    return {name: argument for name, argument in named.items() if name}


@dataclass(frozen=True, order=True)
class SavedPlace:
    """Where a script was when a checkpoint was made: in which of its loops, how many epochs of this
    loop were done, and how many batches had been trained since the start. Later places are
    greater."""

    loop: int
    done: int
    step: int

    @property
    def name(self) -> str:
        return f"loop{self.loop}-epoch{self.done:05}-step{self.step:09}"


class WriterFailed(CheckpointError):
    """A worker has failed while it wrote a checkpoint."""


class CheckpointFolder:
    """Owns the automatic checkpoints of one run: those in its folder that have a record, with their
    scores, and the save that is running. Everything else in the folder is the user's, and is
    neither loaded, replaced nor deleted. A trainer that `resumes` loads the newest of them."""

    def __init__(self, settings: AutoCheckpoint, suffix: str, *, resumes: bool = True) -> None:
        self.settings, self._suffix, self.resumes = settings, suffix, resumes
        where = locations.place(settings.path)
        self._where = where.absolute() if isinstance(where, Path) else where
        self._claim: FolderClaim | None = None
        self._writing = threading.Lock()  # is held while records and rows are written
        self._saving: threading.Thread | None = None
        self._error: BaseException | None = None
        self._read()

    def _read(self) -> None:
        self._scores: dict[SavedPlace, float | None] = {}
        self._not_finite: set[SavedPlace] = set()  # those whose loss or score was not
        self._unrecorded: dict[str, str] = {}  # names of files that are not this run's, and why
        try:
            names = locations.names(self._where)
        except OSError as error:
            raise CheckpointError(f"the checkpoints in {self} cannot be read: {error}") from error
        for place in filter(None, {_place_of(name, RECORD) or _place_of(name, self._suffix) for name in names}):
            files = {place.name + suffix for suffix in (self._suffix, RECORD)}.intersection(names)
            if place.name + RECORD not in files:
                self._unrecorded |= dict.fromkeys(files, f"there is no {place.name}{RECORD}")
                continue
            try:
                record = self.record(place)
            except CheckpointError as error:
                self._unrecorded |= dict.fromkeys(files, str(error))
                continue
            if len(files) == 2:
                is_other = self.settings.best not in (None, record.get("best", self.settings.best))
                self._note(place, None if is_other else record["score"], finite=record.get("finite", True))

    def _note(self, place: SavedPlace, score: float | None, *, finite: bool) -> None:
        if not finite:
            self._not_finite.add(place)
        self._scores[place] = score

    def refuse_earlier_run(self) -> None:
        """Raise an error if there are checkpoints, which a new run would mix with its own."""
        if self._scores:
            raise ConfigError(
                f"{self} has checkpoints of an earlier run: pass resume='auto' to continue it, or another path"
            )
        if self._unrecorded:
            raise ConfigError(
                f"{self} has {_listed(self._unrecorded)}, which may be of an earlier run: move what you need to another folder, "
                "or pass another path"
            )

    def claim(self) -> None:
        """Take the folder for this trainer until `release`. Raise an error if another one uses it,
        or if it has checkpoints that are not to be continued."""
        self._claim = FolderClaim(self._where)
        self._read()  # again: until now, another trainer may have used the folder
        if not self.resumes:
            self.refuse_earlier_run()
        self._claim.take()
        self._delete_drafts()
        if self._unrecorded:
            shown = _listed(self._unrecorded)
            why = self._unrecorded[min(self._unrecorded)]
            logger.warning("%s: raysgd neither loads nor deletes %s, because %s", self, shown, why)

    def _delete_drafts(self) -> None:
        """Delete drafts of this run's checkpoints, which killed processes have left behind."""
        for path in self._where.iterdir() if isinstance(self._where, Path) else ():
            if DRAFT.fullmatch(path.name):
                path.unlink(missing_ok=True)  # another process may do the same

    def release(self) -> None:
        """Let other trainers use the folder. A save that is running, which a shutdown by force does
        not wait for, writes nothing there any more."""
        has_lock = self._writing.acquire(timeout=RELEASE_S)
        if self._claim is not None:
            self._claim.release()
            self._claim = None
        if has_lock:
            self._writing.release()

    def __str__(self) -> str:
        return str(self._where)

    # -- what is there --------------------------------------------------------------------------------

    def newest_first(self) -> list[SavedPlace]:
        return sorted(list(self._scores), reverse=True)

    def path(self, place: SavedPlace | None) -> str | None:
        return None if place is None else locations.text_of(self._file(place))

    @property
    def latest(self) -> SavedPlace | None:
        return max(list(self._scores), default=None)

    @property
    def best(self) -> SavedPlace | None:
        """The checkpoint with the best score; of equals, the oldest."""
        scores = dict(self._scores)  # a copy, because a save that is running may change them
        scored = [place for place in sorted(scores) if scores[place] is not None]
        return min(scored, key=lambda place: self._cost(scores[place]), default=None)

    def improves(self, score: float | None) -> bool:
        return self._cost(score) < min(map(self._cost, list(self._scores.values())), default=math.inf)

    def record(self, place: SavedPlace) -> dict[str, Any]:
        """What was stored with a checkpoint: its score, whether that and the loss were finite, the
        history, what the run had `made`, and, of one within a call, what that had `measured`."""
        file = self._file(place, RECORD)
        content = folders.parse_json(locations.read(file), file)
        if not _is_record(content):
            raise CheckpointError(f"{file} is damaged: it is not the record of a checkpoint")
        return content

    def is_damaged(self, place: SavedPlace) -> bool:
        """Whether a checkpoint does not have its checksums. An error of the storage is raised
        instead."""
        data = locations.read(self._file(place))
        try:
            return not checksums.verify(data)
        except CheckpointError:
            return True

    # -- saving ---------------------------------------------------------------------------------------

    def save(
        self,
        place: SavedPlace,
        score: float | None,
        rows: Sequence[Mapping[str, Any]],
        start: Callable[[str], Callable[[], Any]],
        run: Mapping[str, Any],
        *,
        finite: bool = True,
        measured: Callable[[], Measured] | None = None,
        written: Callable[[str], None] = lambda path: None,
        fail: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """Save a checkpoint, after the one that is running. `start(path)` copies the state, and
        returns a function that returns when the file is complete; that is waited for in a thread.
        Raise the error of an earlier save.

        Within a call, the thread also waits for what that has `measured`, calls `written` with the
        path, and `fail` with an error. A worker's failure is none: training continues."""
        self.wait()
        assert self._claim is not None
        check = self._claim.check
        check()
        self._keep_unrecorded(place)
        path = locations.text_of(self._file(place))
        finish = start(path)
        rows = [dict(row) for row in rows]  # the newest one can still change
        record = {"score": score, "best": self.settings.best, **run}

        def complete() -> None:
            try:
                finish()
                if measured is not None:
                    record["measured"] = numbers_of(measured())
                record["finite"] = finite and is_finite(record.get("measured", {}).get("metrics", {}))
                with self._writing:
                    if self._claim is None:
                        return
                    check()
                    record["history"] = [for_json(row, strict=False) for row in rows]
                    locations.write(self._file(place, RECORD), folders.dump_json(record))
                    self._note(place, score, finite=record["finite"])
                    written(path)
                    self._prune()
            except BaseException as error:
                if isinstance(error, WriterFailed):
                    logger.warning("no automatic checkpoint was saved after step %d: %s", place.step, error)
                    return
                self._error = error
                fail(self._not_saved(error))

        self._saving = threading.Thread(target=complete, name="raysgd-auto-checkpoint", daemon=True)
        self._saving.start()

    def is_saving(self) -> bool:
        return self._saving is not None and self._saving.is_alive()

    def wait(self) -> None:
        """Wait for the save that is running. Raise the error of a save that has failed."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.join()
        error, self._error = self._error, None
        if error is not None:
            raise self._not_saved(error) from error

    def _not_saved(self, error: BaseException) -> CheckpointError:
        return CheckpointError(f"the automatic checkpoint in {self} could not be saved: {error}")

    def wait_until_ended(self) -> None:
        """Wait for the save that is running, whether it fails or not."""
        if self._saving is not None:
            self._saving.join()

    def has(self, path: str) -> bool:
        """Whether this checkpoint is complete."""
        return any(self.path(place) == path for place in list(self._scores))

    def forget(self, place: SavedPlace) -> None:
        self._scores.pop(place, None)
        try:
            for suffix in (self._suffix, RECORD):  # in this order: without its record, it would not be deleted later
                locations.delete(self._file(place, suffix))
        except (OSError, CheckpointError) as error:
            logger.warning("the checkpoint %s could not be deleted: %s", self._file(place), error)

    def _prune(self) -> None:
        newest = self.newest_first()
        finite = next((place for place in newest if place not in self._not_finite), None)
        stay = {*newest[: self.settings.keep], self.best, finite}
        for place in newest:
            if place not in stay:
                self.forget(place)

    def _keep_unrecorded(self, place: SavedPlace) -> None:
        """Rename what a save would replace, although this run has no record of it."""
        for suffix in (self._suffix, RECORD):
            if place.name + suffix in self._unrecorded:
                new_path = locations.move_aside(self._file(place, suffix))
                del self._unrecorded[place.name + suffix]
                logger.warning("%s is not of this run, and is kept as %s", self._file(place, suffix), new_path)

    def _file(self, place: SavedPlace, suffix: str | None = None) -> locations.Place:
        return self._where / (place.name + (suffix or self._suffix))

    def _cost(self, score: float | None) -> float:
        return cost(score, self.settings.mode)


def is_finite(values: Mapping[str, Any]) -> bool:
    """Whether no loss among these metrics is infinite or NaN."""
    return all(math.isfinite(value) for name, value in values.items() if "loss" in name and isinstance(value, float))


def numbers_of(measured: Measured) -> dict[str, Any]:
    """The numbers of a result for a record, and the weights of those that have their own."""
    values = {name: each for name, each in measured.metrics.items() if isinstance(each, (int, float))}
    weights = {name: each.weight for name, each in values.items() if isinstance(each, WeightedMean)}
    numbers = {name: float(each) if name in weights else each for name, each in values.items()}
    return {"metrics": numbers, "weights": weights, "committed": measured.committed, "drawn": measured.drawn}


def measured_in(record: Mapping[str, Any]) -> Measured | None:
    """What the call had measured in which a checkpoint was made, None of one after a call."""
    values = record.get("measured")
    if values is None:
        return None
    weighted = {name: WeightedMean(values["metrics"][name], weight) for name, weight in values["weights"].items()}
    return Measured({**values["metrics"], **weighted}, values["committed"], values.get("drawn", 0))


def _place_of(name: str, suffix: str) -> SavedPlace | None:
    """The place in the name of a file that `CheckpointFolder` wrote; None for other files."""
    match = NAME.fullmatch(name.removesuffix(suffix)) if name.endswith(suffix) else None
    place = SavedPlace(*map(int, match.groups())) if match else None
    return place if place is not None and place.name + suffix == name else None


def _is_record(content: Mapping[str, Any]) -> bool:
    """Whether this is what `save` stores with a checkpoint."""
    score, history = content.get("score", ""), content.get("history")
    return (
        (score is None or is_real(score))
        and isinstance(history, list)
        and all(isinstance(row, dict) and row.keys() >= set(ROW_FIELDS) for row in history)
    )


def _listed(names: Collection[str]) -> str:
    first = ", ".join(sorted(names)[:LISTED])
    return f"{first} and {len(names) - LISTED} more" if len(names) > LISTED else first
