"""Keeps a run's checkpoints: the newest in memory, the best in storage. Driver."""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from raysgd.errors import CheckpointError, ConfigError
from raysgd.storage import folders, locations
from raysgd.storage.locations import Place
from raysgd.storage.remote import Uri, probe
from raysgd.train.checkpoint import Checkpoint, is_directory
from raysgd.train.settings import CheckpointConfig

logger = logging.getLogger("raysgd")

PREFIX = "checkpoint_"
# The limit for one item. Storage that accepts nothing at all for 600 s is an error before that (`storage.remote`).
WRITE_LIMIT_S = 3600.0
POLL_S = 0.5

Work = Callable[[], None]


@dataclass(frozen=True)
class StoredCheckpoint:
    """One checkpoint in storage, with the metrics that were reported with it."""

    number: int
    path: Place
    score: float
    metrics: dict[str, Any]


class CheckpointManager:
    """Owns a directory of checkpoints `checkpoint_000001` and so on, local or remote. Each is
    complete or absent.

    `payload` is the newest checkpoint as bytes, for functions that run again. It exists even if
    nothing is stored.
    """

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
        self.stored: list[StoredCheckpoint] = []

    def check_storage(self) -> None:
        """Raise an error now, and not after an epoch, for a bucket that does not exist."""
        if isinstance(self.directory, Uri) and self.strategy.num_to_keep != 0:
            probe(self.directory)

    def adopt(self, reported: Mapping[int, dict[str, Any]], *, resume: bool = True) -> None:
        """Take over the checkpoints of an earlier run in the directory. Its newest one becomes the
        newest one here.

        `reported` are the metrics of each checkpoint. Without `resume`, the checkpoints are listed
        but not read.
        """
        names = [name.removeprefix(PREFIX) for name in locations.names(self.directory) if name.startswith(PREFIX)]
        places = {number: self.place_of(number) for number in sorted(int(each) for each in names if each.isdigit())}
        complete = {number: place for number, place in places.items() if place.exists()}
        for number, place in complete.items():
            metrics, newest = reported.get(number, {}), number == max(complete)
            if not resume or (self.strategy.by_time and not newest):
                self.stored.append(StoredCheckpoint(number, place, float(number), metrics))
                continue
            payload, score = None, -math.inf
            try:
                payload = Checkpoint(place).to_bytes()
                score = self._score(number, payload, metrics)
            except (CheckpointError, ConfigError) as error:  # its metrics may not have been written
                if newest and isinstance(error, CheckpointError):
                    raise CheckpointError(f"{error}. To resume from an older checkpoint, delete {place}") from error
                logger.warning("%s%06d is ranked last: %s", PREFIX, number, error)
            self.stored.append(StoredCheckpoint(number, place, score, metrics))
            self.payload = self.payload if payload is None else payload
        self.latest_id = max([self.latest_id, *reported, *complete])

    def register(self, payload: bytes) -> int:
        """Make a checkpoint the newest one, before storage can fail. Return its number."""
        self.latest_id += 1
        self.payload = payload
        return self.latest_id

    def store(self, number: int, payload: bytes, metrics: dict[str, Any]) -> None:
        """Write a checkpoint, if it is one of the best, and delete those that no longer are."""
        keep = self.strategy.num_to_keep
        if keep == 0:
            return
        new = StoredCheckpoint(number, self.place_of(number), self._score(number, payload, metrics), dict(metrics))
        # Of equal checkpoints, the stored ones stay, and of these the newer ones.
        ranked = sorted([*self.stored, new], key=lambda each: (each.score, each is not new, each.number))
        surplus = ranked[: max(len(ranked) - keep, 0)] if keep is not None else []
        if new not in surplus:
            self._write(new.path, payload)
        self.stored = [each for each in [*self.stored, new] if each not in surplus]
        for each in surplus:
            if each is not new:
                locations.delete(each.path)

    def place_of(self, number: int) -> Place:
        """Where the checkpoint with this number is stored, if it is."""
        return self.directory / f"{PREFIX}{number:06d}"

    def _score(self, number: int, payload: bytes, metrics: dict[str, Any]) -> float:
        if self.strategy.by_time:
            return float(number)  # the clock may be set back
        content = {} if is_directory(payload) else Checkpoint.from_bytes(payload, trusted=True).to_dict()
        return self.strategy.score(content, metrics)

    @staticmethod
    def _write(place: Place, payload: bytes) -> None:
        if not is_directory(payload):
            locations.write(place, payload)
            return
        with locations.draft_folder(place) as draft:
            folders.unpack(payload, draft)

    @property
    def latest(self) -> Checkpoint | None:
        """The newest checkpoint, stored or not."""
        return None if self.payload is None else Checkpoint.from_bytes(self.payload, trusted=True)

    @property
    def latest_path(self) -> Place | None:
        """Where the newest stored checkpoint is."""
        return max(self.stored, key=lambda each: each.number).path if self.stored else None

    @property
    def best_path(self) -> Place | None:
        """Where the best stored checkpoint is; of equal ones, the newer."""
        return max(self.stored, key=lambda each: (each.score, each.number)).path if self.stored else None


class RunCheckpoints:
    """What users read of the newest run's checkpoints. A subclass has its `checkpoint_manager`."""

    @property
    def checkpoint_manager(self) -> CheckpointManager | None:
        """What stores the newest run's checkpoints, None before the first run."""
        raise NotImplementedError

    @property
    def latest_checkpoint(self) -> dict[str, Any] | None:
        """The newest checkpoint of the newest run, stored or not."""
        latest = None if self.checkpoint_manager is None else self.checkpoint_manager.latest
        return None if latest is None else latest.to_dict()

    def get_latest_checkpoint(self) -> dict[str, Any] | None:
        """Return `latest_checkpoint`."""
        return self.latest_checkpoint

    @property
    def latest_checkpoint_dir(self) -> Place | None:
        """Where the newest run's checkpoints are stored."""
        return None if self.checkpoint_manager is None else self.checkpoint_manager.directory

    @property
    def latest_checkpoint_path(self) -> Place | None:
        """Where the newest stored checkpoint is."""
        return None if self.checkpoint_manager is None else self.checkpoint_manager.latest_path

    @property
    def best_checkpoint_path(self) -> Place | None:
        """Where the run's best stored checkpoint is; by default, the newest."""
        return None if self.checkpoint_manager is None else self.checkpoint_manager.best_path


class BackgroundWriter:
    """Does work in order on a thread of its own, so that a recovery never waits for a disk or a
    bucket.

    Owns the thread and its queue. `fail` is called with the first error, and later work is not
    done. Storing something for longer than WRITE_LIMIT_S is an error, which the thread that waits
    notices, and nothing waits for it any more.
    """

    def __init__(self, fail: Callable[[BaseException], None]) -> None:
        self._fail = fail
        self._work: queue.SimpleQueue[tuple[Work, bool] | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._late_at = math.inf  # when the storing that has begun takes too long
        self.error: BaseException | None = None
        threading.Thread(target=self._serve, name="raysgd-writer", daemon=True).start()

    def put(self, work: Work, *, stores: bool) -> None:
        self._work.put((work, stores))

    def finish(self) -> BaseException | None:
        """Wait until all work is done. Return the error, if there was one."""
        self._work.put(None)
        while not self._ended.wait(POLL_S):
            self.check_time()
        return self.error

    def check_time(self) -> None:
        """Stop waiting for something that takes too long to store."""
        if time.monotonic() > self._late_at:
            self._stop(
                CheckpointError(
                    f"a checkpoint could not be stored within {WRITE_LIMIT_S:g} s, so raysgd stopped waiting for it. The "
                    "checkpoint is incomplete and invisible to readers; earlier checkpoints are not affected"
                )
            )
            self._ended.set()

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            work, stores = item
            try:
                if self.error is None:
                    self._late_at = time.monotonic() + WRITE_LIMIT_S if stores else math.inf
                    work()
            except BaseException as error:  # passed to the thread that waits for the run
                self._stop(error)
            finally:
                self._late_at = math.inf
        self._ended.set()

    def _stop(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
            self._fail(error)
