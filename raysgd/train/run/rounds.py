"""The attempts of a run of a training function, their rounds of reports and checkpoints. Driver."""

from __future__ import annotations

import logging
import math
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from raysgd.callbacks.base import TRACES
from raysgd.core.channel.messages import FunctionReport
from raysgd.core.decisions.policy import Recovery
from raysgd.engine.call_lock import Claim
from raysgd.environment import flag_from_environment
from raysgd.errors import ranked
from raysgd.train.backends import Backend
from raysgd.train.checkpoint import Checkpoint, is_directory
from raysgd.train.errors import ReportMismatchError
from raysgd.train.run.checkpoint_manager import POLL_S, BackgroundWriter, CheckpointManager
from raysgd.train.run.job import FunctionJob
from raysgd.train.sessions import Attempt
from raysgd.workers.serialization import pickler_class

logger = logging.getLogger("raysgd")

DETAILED = "TRAIN_RESULT_ENABLE_DETAILED_AUTOFILLED_METRICS"
LONG_S = 60.0  # for a rank to wait until the others report, before a warning
CALLS = {"report": "train.report()", "checkpoint": "train.save_checkpoint()"}
ON_EVERY_RANK = "Call it on every rank, and not under `if world_rank() == 0`"
WAITS_LONG = "%s within %.0f s. The call returns when every rank has made it. A rank that waits in a collective call never makes it. %s"


@dataclass(frozen=True)
class Report:
    """One call of `train.report` or `train.save_checkpoint`, with the checkpoint's bytes."""

    rank: int
    kind: Literal["report", "checkpoint"] = "report"
    metrics: dict[str, Any] = field(default_factory=dict)
    checkpoint: bytes | None = None
    outside: bool = False


Round = tuple[Report, ...]


class OpenRound:
    """Owns the reports of the round that an attempt is in, and which ranks have returned."""

    def __init__(self, world_size: int) -> None:
        self._world_size, self._returned = world_size, set[int]()
        self._reports: dict[int, Report] = {}

    def add(self, report: Report) -> Round | None:
        """Add a rank's report. If this completes the round, return it, and open the next one."""
        self._reports[report.rank] = report
        self._check()
        if len(self._reports) < self._world_size:
            return None
        complete = tuple(self._reports[rank] for rank in range(self._world_size))
        self._reports = {}
        return complete

    def note_return(self, rank: int) -> None:
        """Note that the function has returned on this rank."""
        self._returned.add(rank)
        self._check()

    def _check(self) -> None:
        """Raise ReportMismatchError if the ranks made different calls, or wait for one that has
        returned."""
        if len({each.kind for each in self._reports.values()}) > 1:
            called = _describe_each(self._reports.values())
            raise ReportMismatchError(
                f"the ranks made different calls: {called}. Every rank must make the same calls in the same order"
            )
        missing = self._returned - self._reports.keys()
        if self._reports and missing:
            raise ReportMismatchError(
                f"{_describe_each(self._reports.values())}, and the function has returned on {ranked(sorted(missing))} "
                f"without it. The call returns when every rank has made it. {ON_EVERY_RANK}"
            )

    def describe_wait(self) -> str:
        """Say which ranks wait for which."""
        missing = sorted({*range(self._world_size)} - self._reports.keys())
        return f"{_describe_each(self._reports.values())}, and {ranked(missing)} did not"


def checkpoint_of(round_: Round) -> bytes | None:
    """The checkpoint of the lowest rank that has one, as all have the same state."""
    return next((report.checkpoint for report in round_ if report.checkpoint is not None), None)


def _describe_each(reports: Iterable[Report]) -> str:
    """Say which ranks made which call."""
    ranks = {kind: sorted(each.rank for each in reports if each.kind == kind) for kind in CALLS}
    return "; ".join(f"{ranked(ranks[kind])} called {call}" for kind, call in CALLS.items() if ranks[kind])


@dataclass(frozen=True)
class RoundResult:
    """A round: the metrics of each rank, its profiler traces, and the number of the newest
    checkpoint at that time."""

    rows: list[dict[str, Any]]
    traces: list[dict[str, bytes]]
    checkpoint_id: int


class FunctionRun:
    """Owns the open round of the current attempt, the queue of complete rounds, the writer that
    stores checkpoints, and the ranks that wait in a report. Its driver sets the thread that
    performs it, the claim that says since when, and the recoveries, each with the number of rounds
    before it as its step.

    A report returns when its round is complete and stored, or its attempt has ended. What an
    attempt has reported of a round that is not complete then is dropped, and the next attempt
    reports it again. Calls `fail` for errors in here, because reports are received while the engine
    is waiting for the function, and `saved` when there is a new checkpoint: a commit that a worker
    left before that is an older state.
    """

    thread: threading.Thread
    claim: Claim
    recoveries: list[Recovery]

    def __init__(
        self,
        number: int,
        manager: CheckpointManager,
        job: FunctionJob,
        backend: Backend,
        *,
        fail: Callable[[BaseException], None],
        saved: Callable[[], None] = lambda: None,
    ) -> None:
        self.number, self.manager, self.job, self._backend = number, manager, job, backend
        self._fail, self._saved = fail, saved
        # What lets each rank of a round continue. Either thread takes it, and `pop` lets only one have it.
        self._waiting: dict[int, list[Callable[[], None]]] = {}
        self._attempt = 0
        self.reports = self._outside = self._closed = 0  # rounds: those with metrics, which were outside, and all
        self._round = OpenRound(0)
        self._warn_at = math.inf
        self._complete: queue.SimpleQueue[RoundResult | None] = queue.SimpleQueue()
        self._writer = BackgroundWriter(fail)
        self.values: list[Any] = []
        self.error: BaseException | None = None

    # -- the engine's thread --------------------------------------------------------------------------

    def begin_attempt(self, world_size: int, nodes: Sequence[str] = ()) -> Attempt:
        """Make what the ranks need for the next attempt."""
        self._let_everyone_continue()  # their calls have ended, but not what the function has started
        self._attempt += 1
        self._round, self._warn_at = OpenRound(world_size), math.inf
        shards = self.job.shards(world_size, nodes) if self.job.shards is not None else ()
        return Attempt(
            run=self.number,
            number=self._attempt,
            reports=self.reports,
            outside=self._outside,
            metadata=dict(self.job.metadata),
            trial=dict(self.job.trial),
            shards=tuple(shards),
            detailed=flag_from_environment(DETAILED),
        )

    def receive(self, message: FunctionReport, body: Any, acknowledge: Callable[[], None] = lambda: None) -> None:
        """Receive one rank's report. Ignore late reports of earlier attempts."""
        if (message.run, message.attempt) != (self.number, self._attempt):
            acknowledge()
            return
        open_round = self._waiting.setdefault(self._closed + 1, [])
        if not open_round:
            self._warn_at = time.monotonic() + LONG_S
        open_round.append(acknowledge)
        try:
            split = message.metrics_size
            metrics = pickle.loads(body[:split])
            if message.kind == "report":
                metrics = self._backend.decode_data(metrics)
            payload = bytes(memoryview(body)[split:]) if message.has_checkpoint else None
            complete = self._round.add(Report(message.rank, message.kind, metrics, payload, message.outside))
            if complete is not None:
                self._close_round(complete)
        except Exception as error:
            self._end_with(error)

    def note_return(self, rank: int) -> None:
        """Note that the function has returned on this rank."""
        try:
            self._round.note_return(rank)
        except ReportMismatchError as error:
            self._end_with(error)

    def _end_with(self, error: Exception) -> None:
        """End the run, which interrupts the ranks that wait. Ignore all reports that follow."""
        self._attempt, self._round = -1, OpenRound(0)
        self._fail(error)

    def close(self, error: BaseException | None = None) -> None:
        """End the run: no more rounds follow. Wait until all checkpoints are stored."""
        self._attempt = -1
        if self.job.shards is not None:
            self.job.shards.close()
        unstored = self._writer.finish()
        self.error = error or unstored
        self._let_everyone_continue()
        self._complete.put(None)

    def _close_round(self, round_: Round) -> None:
        payload, result, number = checkpoint_of(round_), None, 0
        if payload is not None:
            payload = _decode_checkpoint(self._backend, payload)
            number = self.manager.register(payload)
            self._saved()
        if round_[0].kind == "report":
            self.reports, self._outside = self.reports + 1, self._outside + round_[0].outside
            rows = [report.metrics for report in round_]
            traces = [row.pop(TRACES, {}) for row in rows]
            result = RoundResult(rows, traces, self.manager.latest_id)
        self._closed, self._warn_at = self._closed + 1, math.inf
        settle = partial(self._settle, self._closed, number, payload, round_[0].metrics, result)
        self._writer.put(settle, stores=payload is not None)

    def _settle(
        self, round_: int, number: int, payload: bytes | None, metrics: dict[str, Any], result: RoundResult | None
    ) -> None:
        """Store a round's checkpoint, record the round, make it visible to the user, and let its
        ranks continue. The writer's thread."""
        if payload is not None:
            self.manager.store(number, payload, metrics)
        if result is not None:
            self.job.record(result.rows[0], result.checkpoint_id)
            self._complete.put(result)
        self._let_continue(round_)

    def _let_continue(self, round_: int) -> None:
        for acknowledge in self._waiting.pop(round_, ()):
            acknowledge()

    def _let_everyone_continue(self) -> None:
        for round_ in list(self._waiting):
            self._let_continue(round_)

    def waits_for_storage(self) -> bool:
        """Whether ranks wait for the storage, which the engine's thread asks several times a
        second. Storage that takes too long ends the run. Log that ranks wait long for others."""
        self._writer.check_time()
        if time.monotonic() > self._warn_at:
            self._warn_at = math.inf
            logger.warning(WAITS_LONG, self._round.describe_wait(), LONG_S, ON_EVERY_RANK)
        return any(round_ <= self._closed for round_ in list(self._waiting))

    # -- the user's thread ----------------------------------------------------------------------------

    def next_round(self, on_poll: Callable[[], None] = lambda: None) -> RoundResult | None:
        """Wait for the next round, and take it; None: the function has ended. Raise the error that
        ended the run. `on_poll` is called regularly meanwhile, and before this returns."""
        while True:
            try:
                result = self._complete.get(timeout=POLL_S)
            except queue.Empty:
                on_poll()
                continue
            if result is None:
                self._complete.put(None)  # for the next call
            on_poll()
            if result is None and self.error is not None:
                raise self.error
            return result

    def finish(self) -> list[Any]:
        """Wait for the end. Return what every rank returned, or raise the error."""
        while self.thread.is_alive():
            self.thread.join(POLL_S)
        if self.error is not None:
            raise self.error
        return self.values


def _decode_checkpoint(backend: Backend, payload: bytes) -> bytes:
    """Return a checkpoint that a worker has encoded as the user gave it."""
    if backend.decode_data is Backend.decode_data or is_directory(payload):
        return payload
    content = Checkpoint.from_bytes(payload, trusted=True).to_dict()
    return Checkpoint.from_dict(backend.decode_data(content)).to_bytes(pickler=pickler_class())
