"""Inside a training function: what it is told, and what it reports. No Ray here; messages go to the control desk."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from raysgd.core.messages import FunctionReport
from raysgd.core.metrics import check_metrics
from raysgd.core.progress import Control
from raysgd.core.ranks import RankInfo
from raysgd.errors import ConfigError, described
from raysgd.train.checkpoint import Checkpoint, is_directory
from raysgd.train.errors import OutsideRunError
from raysgd.train.fit.checkpoint_strategy import TIMESTAMP

__all__ = ["Attempt", "Session", "Stopped", "current", "own_address", "running"]


class Stopped(BaseException):
    """Ends a training function from inside: a peer was lost, or everybody stops here for a change of members.

    Not an Exception, so that a function that handles errors of its own lets it pass.
    """

    def __init__(self, *, asked: bool) -> None:
        super().__init__("this attempt of the training function is over; it runs again with the workers there are")
        self.asked = asked


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One fan-out of a training function, as the driver describes it to every rank.

    checkpoint  the newest one of the run, as bytes
    reports     rounds that earlier attempts of the run have reported
    """

    run: int
    number: int = 0
    checkpoint: bytes | None = None
    reports: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    trial: Mapping[str, Any] = field(default_factory=dict)
    shards: tuple[Mapping[str, Any], ...] = ()
    detailed: bool = False


class Session:
    """Owns one rank's counters of one attempt. `dumps` is the pickler that the driver chose; `passed` is told after
    each point where the run could go on with other members."""

    def __init__(
        self,
        rank_info: RankInfo,
        control: Control,
        attempt: Attempt,
        *,
        dumps: Callable[[Any], bytes],
        encode: Callable[[dict[str, Any]], dict[str, Any]],
        passed: Callable[[], None],
        kept: Any = None,
    ) -> None:
        self.rank_info, self.attempt, self.kept = rank_info, attempt, kept
        self.dumps = dumps
        self.amp: Any = None  # what train.torch.accelerate decided
        self._control, self._encode, self.passed = control, encode, passed
        self._payload = attempt.checkpoint
        self._unpacked: Checkpoint | None = None
        self._reports = attempt.reports
        self._began = self._last = time.time()

    # -- reporting ------------------------------------------------------------------------------------

    def report(self, metrics: Mapping[str, Any], checkpoint: Checkpoint | None) -> None:
        """One round of results, maybe with a checkpoint. Returns when the driver has it."""
        check_metrics(metrics, of="train.report() was given what cannot be reported")
        self._reports += 1
        row = {**self._autofilled(), **self._encode(dict(metrics))}
        payload = self._packed(checkpoint) if checkpoint is not None else None
        self._send("report", row, payload)

    def save_checkpoint(self, values: dict[str, Any]) -> None:
        self._send("checkpoint", {}, self._packed(Checkpoint.from_dict(values)))

    def _packed(self, checkpoint: Checkpoint) -> bytes:
        kind, content = checkpoint.get_internal_representation()
        if kind == "data_dict":
            checkpoint = Checkpoint.from_dict({TIMESTAMP: int(time.time()), **self._encode(content)})
        if self.attempt.metadata and checkpoint.can_have_metadata and not checkpoint.get_metadata():
            checkpoint.set_metadata(self.attempt.metadata)
        return checkpoint.checked_bytes(dumps=self.dumps, users_files=True)  # the peers will trust them

    def _send(self, kind: Literal["report", "checkpoint"], metrics: dict[str, Any], payload: bytes | None) -> None:
        self._check_stop()
        head = self._pickled(metrics)
        message = FunctionReport(
            kind, self.attempt.run, self.attempt.number, self.rank_info.world_rank, len(head), payload is not None
        )
        self._control.deliver(message, head if payload is None else b"".join((head, payload)))
        if payload is not None:
            self._payload, self._unpacked = payload, None
            self.passed()
        self._check_stop()

    def _pickled(self, metrics: dict[str, Any]) -> bytes:
        try:
            return self.dumps(metrics)
        except Exception as error:
            names = [name for name, value in metrics.items() if not self._can_be_pickled(value)]
            raise TypeError(
                f"train.report() was given what cannot be sent to the driver: {', '.join(names) or 'the metrics'} "
                f"({described(error)}). Report numbers, strings, arrays, or lists and dictionaries of them"
            ) from error

    def _can_be_pickled(self, value: Any) -> bool:
        try:
            self.dumps(value)
        except Exception:
            return False
        return True

    def _check_stop(self) -> None:
        if self._control.interrupted:
            raise Stopped(asked=False)

    def _autofilled(self) -> dict[str, Any]:
        now = time.time()
        row: dict[str, Any] = {
            TIMESTAMP: int(now),
            "_time_this_iter_s": now - self._last,
            "_training_iteration": self._reports,
        }
        if self.attempt.detailed:
            row |= {
                "_date": time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(now)),
                "_hostname": platform.node(),
                "_node_ip": own_address(),
                "_pid": os.getpid(),
                "_time_total_s": now - self._began,
            }
        self._last = now
        return row

    # -- asking ---------------------------------------------------------------------------------------

    def checkpoint(self) -> Checkpoint | None:
        """The newest: this rank's own of this attempt, else the run's."""
        if self._payload is None or not is_directory(self._payload):
            return None if self._payload is None else Checkpoint.from_bytes(self._payload, trusted=True)
        if self._unpacked is None:  # files are large: once is enough
            self._unpacked = Checkpoint.from_bytes(self._payload, trusted=True)
        return self._unpacked

    def shard(self, name: str | None) -> Any:
        """This rank's part of a data set that was given to the trainer; None when none was."""
        if not self.attempt.shards:
            return None
        mine = self.attempt.shards[self.rank_info.world_rank]
        if name is None:
            if len(mine) == 1:
                return next(iter(mine.values()))
            raise ConfigError(f"several data sets were given: name one of {', '.join(sorted(mine))}")
        if name not in mine:
            raise ConfigError(
                f"there is no data set {name!r}: the trainer was given {', '.join(sorted(mine)) or 'none'}"
            )
        return mine[name]


# Functions without arguments (`train.report`) need one place that knows where they are called. There is one main thread
# in a worker, and its function may start threads that report too; so it is a plain variable, not a thread's own.
_running: list[Session] = []


class running:
    """While a training function runs. Not contextlib's: that assigns to the exception that passes, and some refuse it."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __enter__(self) -> None:
        _running.append(self._session)

    def __exit__(self, *error: object) -> None:
        _running.remove(self._session)


def current(function: str) -> Session:
    """The session of the training function that runs in this process."""
    if not _running:
        raise OutsideRunError(
            f"train.{function}() works only inside a training function, while a trainer runs it on its workers "
            "(Trainer.run, run_iterator, fit). In the script itself, use what the trainer returns"
        )
    return _running[-1]


def own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
