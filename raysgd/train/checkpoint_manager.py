"""The checkpoints of one run, on the driver: the newest in memory, the best ones in storage."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysgd.errors import CheckpointError, ConfigError
from raysgd.storage import locations
from raysgd.storage.folders import MARKER
from raysgd.storage.locations import Place
from raysgd.storage.remote import Uri, probe
from raysgd.train.checkpoint import Checkpoint, is_directory, unpack
from raysgd.train.fit.checkpoint_strategy import CheckpointConfig

__all__ = ["CheckpointKeeper", "Kept"]

logger = logging.getLogger("raysgd")

PREFIX = "checkpoint_"


@dataclass(frozen=True)
class Kept:
    """One checkpoint in storage, with what was reported beside it."""

    number: int
    path: Place
    score: float
    metrics: dict[str, Any]


class CheckpointKeeper:
    """Owns a folder of files `checkpoint_000001`, local or remote, each written whole or not at all. `payload` is the
    newest one as bytes: what a function that runs again is given, also when nothing is written."""

    def __init__(
        self,
        directory: Place,
        strategy: CheckpointConfig | None = None,
        *,
        latest_id: int = 0,
        initial: bytes | None = None,
    ) -> None:
        self.directory = directory
        self.strategy = strategy or CheckpointConfig()
        self.latest_id = latest_id
        self.payload = initial
        self.kept: list[Kept] = []

    def check_storage(self) -> None:
        """A bucket that is not there is an error now, not at the end of the first epoch."""
        if isinstance(self.directory, Uri) and self.strategy.num_to_keep != 0:
            probe(self.directory)

    def adopt(self, reported: Mapping[int, dict[str, Any]], *, to_go_on: bool = True) -> None:
        """What an earlier run has left in the directory goes on being kept, and its newest is what a function is given.
        `reported` are the metrics of each. Not `to_go_on`: only to be looked at, so none is read."""
        found = [name.removeprefix(PREFIX) for name in locations.names(self.directory) if name.startswith(PREFIX)]
        places = {number: self.place_of(number) for number in sorted(int(each) for each in found if each.isdigit())}
        whole = {number: place for number, place in places.items() if place.exists()}
        for number, place in whole.items():
            metrics, newest = reported.get(number, {}), number == max(whole)
            if not to_go_on or (self.strategy.by_time and not newest):
                self.kept.append(Kept(number, place, float(number), metrics))
                continue
            try:
                payload = Checkpoint(place).to_bytes()
            except CheckpointError as error:
                if newest:
                    raise CheckpointError(f"{error}. To go on from an older one, delete {place}") from error
                logger.warning("%s%06d counts as the worst: %s", PREFIX, number, error)
                self.kept.append(Kept(number, place, -math.inf, metrics))
                continue
            self.kept.append(Kept(number, place, self._score_again(number, payload, metrics), metrics))
            self.payload = payload
            if isinstance(place, Path) and place.is_dir() and not (place / MARKER).exists():
                locations.warn_without_digest(place)
        self.latest_id = max([self.latest_id, *reported, *whole])

    def take(self, payload: bytes, metrics: dict[str, Any]) -> None:
        """The newest checkpoint: kept in memory before anything can go wrong, then stored."""
        self.store(self.note(payload), payload, metrics)

    def note(self, payload: bytes) -> int:
        """From now on it is the newest one, under this number."""
        self.latest_id += 1
        self.payload = payload
        return self.latest_id

    def store(self, number: int, payload: bytes, metrics: dict[str, Any]) -> None:
        """Writes it, if it is one of the best, and deletes what is not any more. May run beside `note`."""
        keep = self.strategy.num_to_keep
        if keep == 0:
            return
        new = Kept(number, self.place_of(number), self._score(number, payload, metrics), dict(metrics))
        # Of equals the ones that are there already stay, and of those the newer.
        ranked = sorted([*self.kept, new], key=lambda kept: (kept.score, kept is not new, kept.number))
        surplus = ranked[: len(ranked) - keep] if keep is not None else []
        if new not in surplus:
            self._write(new.path, payload)
        self.kept = [kept for kept in [*self.kept, new] if kept not in surplus]
        for kept in surplus:
            if kept is not new:
                locations.delete(kept.path)

    def place_of(self, number: int) -> Place:
        """Where the checkpoint of this number lies, if it was written."""
        return self.directory / f"{PREFIX}{number:06d}"

    def _score(self, number: int, payload: bytes, metrics: dict[str, Any]) -> float:
        if self.strategy.by_time:
            return float(number)  # a clock may be set back
        content = {} if is_directory(payload) else Checkpoint.from_bytes(payload, trusted=True).to_dict()
        return self.strategy.score(content, metrics)

    def _score_again(self, number: int, payload: bytes, metrics: dict[str, Any]) -> float:
        """A run that was killed may have stored a checkpoint whose report was never written. It goes on all the same."""
        try:
            return self._score(number, payload, metrics)
        except ConfigError as error:
            logger.warning("%s%06d counts as the worst: %s", PREFIX, number, error)
            return -math.inf

    @staticmethod
    def _write(place: Place, payload: bytes) -> None:
        if not is_directory(payload):
            locations.write(place, payload)
            return
        with locations.draft_folder(place) as draft:
            unpack(payload, draft)

    @property
    def latest(self) -> Checkpoint | None:
        """The newest one, also if it was never written."""
        return None if self.payload is None else Checkpoint.from_bytes(self.payload, trusted=True)

    @property
    def latest_path(self) -> Place | None:
        """The newest one in storage."""
        return max(self.kept, key=lambda kept: kept.number).path if self.kept else None

    @property
    def best_path(self) -> Place | None:
        """The best one in storage; the newer of equals."""
        return max(self.kept, key=lambda kept: (kept.score, kept.number)).path if self.kept else None
