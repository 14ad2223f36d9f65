"""Automatic checkpoints: when they are made, which of them stay, and which one a restarted script takes. Driver."""

from __future__ import annotations

import logging
import math
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from raysgd.callbacks.writers import for_json
from raysgd.config import at_least, is_real
from raysgd.core.metrics import plain
from raysgd.errors import CheckpointError, ConfigError, suggesting_fields
from raysgd.storage import digest, folders, locations

__all__ = ["AutoCheckpoint", "CheckpointFolder", "SavedPlace"]

logger = logging.getLogger("raysgd")

NAME = re.compile(r"loop(\d+)-epoch(\d+)-step(\d+)")
RECORD = ".json"  # written after the checkpoint: a checkpoint without its record is incomplete, and is never loaded


# Words in the names of metrics of which more is better.
HIGHER_IS_BETTER = {
    "acc",
    "accuracy",
    "auc",
    "auroc",
    "bleu",
    "f1",
    "hits",
    "iou",
    "map",
    "precision",
    "recall",
    "score",
}


@suggesting_fields
@dataclass(frozen=True, kw_only=True)
class AutoCheckpoint:
    """Makes checkpoints in the loop over `trainer.epochs()`, and in `trainer.fit()`, in the background.

        TorchTrainer(..., checkpoints=AutoCheckpoint(path="runs/first", best="val_loss"), resume="auto")

    path     the folder of the checkpoints: a path, or a URI such as "s3://bucket/run"
    every    "epoch": after each pass of the loop; a number of batches, or seconds as a float: also within an epoch
    keep     how many of the newest checkpoints stay; None: all
    best     the metric whose best checkpoint stays, too
    mode     "min" or "max": which values of this metric are better
    trusted  resume="auto" may load objects of your own types, which can run code (`load(trusted=True)`)
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
        if self.mode not in ("min", "max"):
            raise ConfigError(f"mode must be 'min' or 'max', got {self.mode!r}")
        if (
            self.best is not None
            and self.mode == "min"
            and HIGHER_IS_BETTER & set(re.split(r"[^a-z0-9]+|_", self.best.lower()))
        ):
            logger.warning(
                "AutoCheckpoint(best=%r) keeps the checkpoint with the lowest value: pass mode='max' for the highest",
                self.best,
            )
        if not isinstance(self.trusted, bool):
            raise ConfigError(f"trusted must be True or False, got {self.trusted!r}")


@dataclass(frozen=True, order=True)
class SavedPlace:
    """Where a script was when a checkpoint was made: in which of its loops, how many epochs of this loop were done, and
    how many batches had been trained since the start. Later places are greater."""

    loop: int
    done: int
    step: int

    @property
    def name(self) -> str:
        return f"loop{self.loop}-epoch{self.done:05}-step{self.step:09}"


class CheckpointFolder:
    """Owns the automatic checkpoints of one trainer: those in its folder with their scores, and the save that is
    running. Another trainer must not use the folder at the same time."""

    def __init__(self, settings: AutoCheckpoint, suffix: str) -> None:
        self.settings, self._suffix = settings, suffix
        where = locations.place(settings.path)
        self._where = where.absolute() if isinstance(where, Path) else where
        self._scores: dict[SavedPlace, float | None] = {}
        self._saving: threading.Thread | None = None
        self._error: BaseException | None = None
        for place in self._complete():
            try:
                self._scores[place] = self.record(place)["score"]
            except CheckpointError as error:
                logger.warning("the checkpoint %s is not used: %s", self._file(place), error)

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
        """Return the checkpoint with the best score; of equals, the oldest."""
        return self._best_of(dict(self._scores))

    def _best_of(self, scores: Mapping[SavedPlace, float | None]) -> SavedPlace | None:
        scored = [place for place in sorted(scores) if scores[place] is not None]
        return min(scored, key=lambda place: self._cost(scores[place]), default=None)

    def improves(self, score: float | None) -> bool:
        """Return whether this score is better than those of all checkpoints."""
        scores = dict(self._scores)  # a copy, because a save that is running may change them
        best = self._best_of(scores)
        return self._cost(score) < (math.inf if best is None else self._cost(scores[best]))

    def record(self, place: SavedPlace) -> dict[str, Any]:
        """Return what was stored with a checkpoint: its score, the history until then, and (not in older ones) how many epochs
        and workers the run had."""
        file = self._file(place, RECORD)
        found, has_digest = folders.parse_json(locations.read(file), file)
        if not has_digest or not {"score", "history"} <= found.keys():
            raise CheckpointError(f"{file} is damaged: it is not the record of a checkpoint")
        return found

    def is_damaged(self, place: SavedPlace) -> bool:
        """Return whether a checkpoint does not have its digest. An error of the storage is raised instead."""
        data = locations.read(self._file(place))
        try:
            return not digest.verify(data)
        except CheckpointError:
            return True

    # -- saving ---------------------------------------------------------------------------------------

    def save(
        self,
        place: SavedPlace,
        score: float | None,
        rows: Sequence[Mapping[str, Any]],
        start: Callable[[str], Callable[[], Any]],
        **run: int,
    ) -> None:
        """Save a checkpoint, after the one that is running. `start(path)` copies the state, and returns a function that
        returns when the file is complete; that is waited for in a thread. Raise the error of an earlier save."""
        self.wait()
        finish = start(locations.text_of(self._file(place)))
        record = folders.dump_json({"score": score, "history": [_storable(row) for row in rows], **run})

        def complete() -> None:
            try:
                finish()
                locations.write(self._file(place, RECORD), record)
                self._scores[place] = score
                self._prune()
            except BaseException as error:
                self._error = error

        self._saving = threading.Thread(target=complete, name="raysgd-auto-checkpoint", daemon=True)
        self._saving.start()

    def wait(self) -> None:
        """Wait for the save that is running. Raise the error of a save that has failed."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.join()
        error, self._error = self._error, None
        if error is not None:
            raise CheckpointError(f"the automatic checkpoint in {self} could not be saved: {error}") from error

    def forget(self, place: SavedPlace) -> None:
        """Delete a checkpoint."""
        self._scores.pop(place, None)
        for suffix in (RECORD, self._suffix):  # in this order: without its record, it is not a checkpoint any more
            locations.delete(self._file(place, suffix))

    def _prune(self) -> None:
        """Delete checkpoints that need not stay, and what killed scripts have left behind."""
        keep = self.settings.keep
        newest = self.newest_first()
        stay = {*newest[:keep], self.best}
        try:
            for place in newest:
                if place not in stay:
                    self.forget(place)
            for name in locations.names(self._where):
                found = _place_of(name, self._suffix) or _place_of(name, RECORD)
                if found is not None and found not in self._scores:
                    locations.delete(self._where / name)
        except (OSError, CheckpointError) as error:
            logger.warning("an old checkpoint in %s could not be deleted: %s", self, error)

    def _complete(self) -> Iterator[SavedPlace]:
        names = set(locations.names(self._where))
        for name in names:
            place = _place_of(name, RECORD)
            if place is not None and place.name + self._suffix in names:
                yield place

    def _file(self, place: SavedPlace, suffix: str | None = None) -> locations.Place:
        return self._where / (place.name + (suffix or self._suffix))

    def _cost(self, score: float | None) -> float:
        """Return a number that is lower for better scores. NaN is as bad as no score."""
        if score is None or math.isnan(score):
            return math.inf
        return score if self.settings.mode == "min" else -score


def _place_of(name: str, suffix: str) -> SavedPlace | None:
    """Return the place in the name of a file that `CheckpointFolder` wrote; None for other files."""
    found = NAME.fullmatch(name.removesuffix(suffix)) if name.endswith(suffix) else None
    place = SavedPlace(*map(int, found.groups())) if found else None
    return place if place is not None and place.name + suffix == name else None


def _storable(value: Any) -> Any:
    """Return a value as JSON has it. Unlike strict JSON, Python's has NaN and infinity."""
    value = plain(value)
    if isinstance(value, Mapping):
        return {str(key): _storable(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_storable(inner) for inner in value]
    return value if isinstance(value, float) else for_json(value)
