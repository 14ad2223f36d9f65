"""Write what a worker does in each step to the audit log. Both."""

from __future__ import annotations

import os
import platform
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from raysgd.config import ElasticConfig
from raysgd.core.audit import FIRST, Chain, new_file
from raysgd.core.ranks import RankInfo
from raysgd.errors import ConfigError
from raysgd.training.feed import Drawn
from raysgd.training.position import Position

__all__ = ["AuditLog", "AuditSettings"]


@dataclass(frozen=True)
class AuditSettings:
    """Where the log is written, and for which run. `began` is the time at which the trainer was created.

    every   after how many steps the ranks write the digest of their weights
    """

    folder: str
    run: str
    began: float
    every: int = 100

    @classmethod
    def of(cls, elastic: ElasticConfig) -> AuditSettings | None:
        """Return the settings of a new run; None if the user asked for no log."""
        if elastic.audit is None:
            return None
        folder = os.path.abspath(os.fspath(elastic.audit))
        return cls(folder, uuid.uuid4().hex[:12], time.time(), elastic.audit_weights_every)


class AuditLog:
    """Owns this worker's file. A line is written when this worker draws a batch: before it contributes to the step."""

    def __init__(self, settings: AuditSettings, digest: Callable[[], str | None]) -> None:
        self._settings, self._digest = settings, digest
        self._chain, self._joined, self._due = Chain(), (-1, -1), 0
        self._unwritten = b""
        worker = f"{platform.node() or 'node'}-{os.getpid()}-{uuid.uuid4().hex[:8]}".replace(" ", "_")
        try:
            self._file = new_file(settings.folder, worker)
        except OSError as error:
            raise ConfigError(
                f"ElasticConfig(audit={settings.folder!r}) must be a folder that every worker can write to, and on {platform.node()} "
                f"it is not ({error}): name another one"
            ) from error
        self._write(f"{FIRST} {settings.run} {settings.began:.3f} {worker} {platform.node() or 'node'} {os.getpid()}")

    def begin(self, rank_info: RankInfo, position: Position) -> None:
        """Note the generation and the position in which a call begins or continues."""
        membership = (rank_info.generation, position.loads)
        if membership != self._joined:
            self._joined, self._due = membership, self._next_after(position.step)
            generation, loads = membership
            rank, world = rank_info.world_rank, rank_info.world_size
            self._write(f"joined {generation} {loads} {rank} {world} {position.step}")

    def drew(self, position: Position, window: Sequence[Drawn], drawn: Drawn) -> None:
        """Note a batch, or a piece of one. `window` has what was drawn before it and is not committed."""
        place, piece, before = 0, 0, position.offset
        for each in window:
            place, piece, before = (place + 1, 0, each.offset) if each.whole else (place, piece + 1, before)
        start, stop, rows = drawn.units or (-1, -1, 0)
        stop = stop if drawn.fresh else start
        lines = [f"batch {position.step} {place} {piece} {before} {drawn.offset} {start} {stop} {rows}"]
        for shard, start, stop in drawn.shards if drawn.fresh else ():
            lines.append(f"part {position.step} {place} {shard} {start} {stop}")
        self._write(*lines)

    def read_out(self, epoch: int, shard: int, shards: int, length: int) -> None:
        """Note that this worker has read a shard of a stream to its end."""
        self._write(f"length {epoch} {shard} {shards} {length}")

    def committed(self, step: int) -> None:
        """Note a digest of the weights from time to time."""
        if step < self._due:
            return
        self._due = self._next_after(step)
        digest = self._digest()
        if digest:
            self._write(f"weights {step} {digest}")

    def _next_after(self, step: int) -> int:
        """Return the next step after which the ranks compare their weights, which is the same for all of a generation."""
        return (step // self._settings.every + 1) * self._settings.every

    def epoch_ended(self, position: Position, total: int, why: str) -> None:
        self._write(f"epoch {position.step} {position.epoch} {position.offset} {total} {why}")

    def done(self, step: int) -> None:
        self._write(f"done {step}")

    def reopened(self) -> AuditLog:
        """Return a log with a file of its own, because this worker goes back to a saved state, as a new worker would begin with it."""
        self.close()
        return AuditLog(self._settings, self._digest)

    def close(self) -> None:
        os.close(self._file)

    def _write(self, *lines: str) -> None:
        """Write lines. What a full disk does not take is written before the next lines, so that the chain stays whole."""
        self._unwritten += b"".join(map(self._chain.line, lines))
        while self._unwritten:
            self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]
