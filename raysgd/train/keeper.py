"""The checkpoints of one run, on the driver: the newest in memory, the best ones on disk."""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysgd import storage
from raysgd.train.checkpoint import Checkpoint, is_directory, unpack
from raysgd.train.strategy import CheckpointConfig

__all__ = ["CheckpointKeeper", "Kept"]

PREFIX = "checkpoint_"


@dataclass(frozen=True)
class Kept:
    """One checkpoint on disk, with what was reported beside it."""

    number: int
    path: Path
    score: float
    metrics: dict[str, Any]


class CheckpointKeeper:
    """Owns a directory of files `checkpoint_000001`, written whole or not at all. `payload` is the newest one as bytes:
    what a function that runs again is given, also when nothing is written."""

    def __init__(
        self,
        directory: Path,
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

    def adopt(self, reported: Mapping[int, dict[str, Any]]) -> None:
        """What an earlier run has left in the directory goes on being kept, and its newest is what a function is given.
        `reported` are the metrics of each."""
        numbered = [(int(path.name.removeprefix(PREFIX)), path) for path in sorted(self.directory.glob(f"{PREFIX}*"))]
        for number, path in numbered:
            payload = Checkpoint(path).to_bytes()
            metrics = reported.get(number, {})
            self.kept.append(Kept(number, path, self._score(payload, metrics), metrics))
            self.payload = payload
        self.latest_id = max([self.latest_id, *reported, *(number for number, _ in numbered)])

    def take(self, payload: bytes, metrics: dict[str, Any]) -> None:
        """The newest checkpoint: kept in memory before anything else can go wrong, then written."""
        self.latest_id += 1
        self.payload = payload
        keep = self.strategy.num_to_keep
        if keep == 0:
            return
        score = self._score(payload, metrics)
        full = keep is not None and len(self.kept) >= keep
        worst = min(self.kept, key=lambda kept: (kept.score, kept.number)) if full else None
        if worst is not None and not self.strategy.by_time and score <= worst.score:
            return
        path = self.directory / f"{PREFIX}{self.latest_id:06d}"
        self._write(path, payload)
        self.kept.append(Kept(self.latest_id, path, score, dict(metrics)))
        if worst is not None:
            self.kept.remove(worst)
            _delete(worst.path)

    def _score(self, payload: bytes, metrics: dict[str, Any]) -> float:
        if self.strategy.by_time:
            return time.time()
        content = {} if is_directory(payload) else Checkpoint.from_bytes(payload).to_dict()
        return self.strategy.score(content, metrics)

    def _write(self, path: Path, payload: bytes) -> None:
        if not is_directory(payload):
            storage.write(path, payload)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f".{path.name}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            temporary.mkdir()
            unpack(payload, temporary)
            temporary.rename(path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    @property
    def latest(self) -> Checkpoint | None:
        """The newest one, also if it was never written."""
        return None if self.payload is None else Checkpoint.from_bytes(self.payload)

    @property
    def latest_path(self) -> Path | None:
        """The newest one on disk."""
        return max(self.kept, key=lambda kept: kept.number).path if self.kept else None

    @property
    def best_path(self) -> Path | None:
        """The best one on disk; the newer of equals."""
        return max(self.kept, key=lambda kept: (kept.score, kept.number)).path if self.kept else None


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
