"""The attempts of a run of a training function, their rounds of reports and checkpoints. Driver."""

from __future__ import annotations

import pickle
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from raysgd.callbacks.base import TRACES
from raysgd.core.messages import FunctionReport
from raysgd.environment import flag_from_environment
from raysgd.errors import ranked
from raysgd.train.backends import Backend
from raysgd.train.checkpoint import Checkpoint, is_directory
from raysgd.train.checkpoint_manager import BackgroundWriter, CheckpointManager
from raysgd.train.errors import ReportMismatchError
from raysgd.train.job import FunctionJob
from raysgd.train.session_functions import Attempt
from raysgd.workers.serialization import dumps

DETAILED = "TRAIN_RESULT_ENABLE_DETAILED_AUTOFILLED_METRICS"
UNSTORED_ROUNDS = 4  # how many rounds the ranks may be ahead of the storage
CALLS = {"report": "train.report()", "checkpoint": "train.save_checkpoint()"}


@dataclass(frozen=True)
class Report:
    """One call of `train.report` or `train.save_checkpoint`, with the checkpoint's bytes."""

    rank: int
    kind: Literal["report", "checkpoint"] = "report"
    metrics: dict[str, Any] = field(default_factory=dict)
    checkpoint: bytes | None = None


Round = tuple[Report, ...]


class Rounds:
    """Groups one attempt's reports into rounds. Owns those of ranks that are ahead."""

    def __init__(self, world_size: int) -> None:
        self._waiting: list[deque[Report]] = [deque() for _ in range(world_size)]

    def add(self, report: Report) -> Round | None:
        """Add a report. Return the round that it completes, if it does. Raise ReportMismatchError
        if another rank made a different call in this round."""
        mine = self._waiting[report.rank]
        mine.append(report)
        same_round = [queue[len(mine) - 1] for queue in self._waiting if len(queue) >= len(mine)]
        if len({each.kind for each in same_round}) > 1:
            raise ReportMismatchError(_describe_calls(same_round))
        if all(self._waiting):
            return tuple(queue.popleft() for queue in self._waiting)
        return None

    def incomplete_of(self, rank: int) -> int:
        """How many rounds in which this rank has reported are incomplete."""
        return len(self._waiting[rank])

    def take_incomplete(self) -> list[Round]:
        """Remove and return the rounds that are still incomplete, oldest first."""
        rounds = []
        while any(self._waiting):
            rounds.append(tuple(queue.popleft() for queue in self._waiting if queue))
        return rounds

    def check_counts(self) -> None:
        """Raise ReportMismatchError if, at the end, some ranks have reported more often."""
        more = [rank for rank, queue in enumerate(self._waiting) if queue]
        if more:
            fewer = [rank for rank, queue in enumerate(self._waiting) if not queue]
            kinds = " and ".join(sorted({CALLS[self._waiting[rank][0].kind] for rank in more}))
            raise ReportMismatchError(
                f"{ranked(more)} called {kinds} more often than {ranked(fewer)}. Every rank must "
                "call it equally often: do not put it under `if world_rank() == 0`"
            )


def checkpoint_of(round_: Round) -> bytes | None:
    """The checkpoint of the lowest rank that has one, as all have the same state."""
    return next((report.checkpoint for report in round_ if report.checkpoint is not None), None)


def _describe_calls(reports: list[Report]) -> str:
    calls = "; ".join(
        f"{ranked(sorted(r.rank for r in reports if r.kind == kind))} called {call}"
        for kind, call in CALLS.items()
        if any(r.kind == kind for r in reports)
    )
    return f"the ranks made different calls: {calls}. Every rank must make the same calls in the same order"


@dataclass(frozen=True)
class RoundResult:
    """A round: the metrics of each rank, its profiler traces, and the number of the newest
    checkpoint at that time.

    A round is incomplete if the workers failed, or the run ended, before every rank had reported.
    It has only rank 0's row, and is only recorded, because no attempt will report it again: the
    checkpoint that goes with it was kept.
    """

    rows: list[dict[str, Any]]
    traces: list[dict[str, bytes]]
    checkpoint_id: int
    complete: bool = True


class FunctionRun:
    """Owns the rounds of the current attempt, the queue of complete rounds, the writer that stores
    checkpoints, and the reports that wait for their acknowledgement.

    Calls `fail` for errors in here, because reports are received while the engine is waiting for
    the function, and `saved` when there is a new checkpoint: a commit that a worker left before
    that is an older state.

    A rank continues when its call is acknowledged: when it was received, unless the storage is
    several rounds behind. So ranks that are in one round wait together: one that continued alone
    would wait for the others in a collective call, which has a time limit. None waits until its
    round is complete. If rank 0 alone reports, it would wait for the others, and they for it in
    their next collective call, until that time limit. As it is, the function ends, and
    `check_counts` says which ranks have reported more often.
    """

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
        # Rounds that the writer has done, and checkpoints that it has not.
        self._settled = self._unstored = 0
        self._waiting: list[tuple[int, Callable[[], None]]] = []  # the number of the round, what acknowledges
        # For `_waiting` and the numbers above it: the engine's thread and the writer's use them.
        self._lock = threading.Lock()
        self._attempt = 0
        self.reports = self._closed = 0  # rounds: those with metrics, and all
        self._rounds = Rounds(0)
        self._complete: queue.SimpleQueue[RoundResult | None] = queue.SimpleQueue()
        self._writer = BackgroundWriter(fail)
        self.values: list[Any] = []
        self.error: BaseException | None = None

    # -- the engine's thread --------------------------------------------------------------------------

    def begin_attempt(self, world_size: int, nodes: Sequence[str] = ()) -> Attempt:
        """Make what the ranks need for the next attempt. Rank 0's newest checkpoint of the last
        attempt counts, because what the driver received from it is never lost."""
        self._close_incomplete_rounds()
        self._let_continue(everyone=True)  # their calls have ended, but not what the function has started
        self._attempt += 1
        self._rounds = Rounds(world_size)
        shards = self.job.shards(world_size, nodes) if self.job.shards is not None else ()
        return Attempt(
            run=self.number,
            number=self._attempt,
            reports=self.reports,
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
        try:
            split = message.metrics_size
            metrics = pickle.loads(body[:split])
            if message.kind == "report":
                metrics = self._backend.decode_data(metrics)
            payload = bytes(memoryview(body)[split:]) if message.has_checkpoint else None
            number = self._closed + self._rounds.incomplete_of(message.rank) + 1
            complete = self._rounds.add(Report(message.rank, message.kind, metrics, payload))
            if complete is not None:
                self._close_round(complete)
        except Exception as error:
            if isinstance(error, ReportMismatchError):
                self._ignore_reports()  # what follows does not belong together either
            self._fail(error)
            acknowledge()
            return
        self._let_continue((number, acknowledge))

    def finish(self, values: list[Any]) -> None:
        """Note what the function returned on every rank."""
        self._rounds.check_counts()
        self.values = values

    def close(self, error: BaseException | None = None) -> None:
        """End the run: no more rounds follow. Wait until all checkpoints are stored."""
        try:
            self._close_incomplete_rounds()
        except Exception as late:
            error = error or late
        if self.job.shards is not None:
            self.job.shards.close()
        unstored = self._writer.finish()
        self.error = error or unstored
        self._ignore_reports()
        self._let_continue(everyone=True)
        self._complete.put(None)

    def _ignore_reports(self) -> None:
        """Let the ranks continue that report from now on, and drop their reports."""
        self._attempt = -1

    def _close_incomplete_rounds(self) -> None:
        """Close the rounds that not all ranks have completed, up to the first checkpoint of rank 0:
        ranks that synchronize in collectives are at most one checkpoint apart, and others must not
        skip work. Drop the rest, which the next attempt repeats."""
        by_rank_0 = [each[:1] for each in self._rounds.take_incomplete() if each[0].rank == 0]
        saved = next((number for number, each in enumerate(by_rank_0, 1) if checkpoint_of(each) is not None), 0)
        for incomplete in by_rank_0[:saved]:
            self._close_round(incomplete, complete=False)

    def _close_round(self, round_: Round, *, complete: bool = True) -> None:
        payload, result, number = checkpoint_of(round_), None, 0
        if payload is not None:
            payload = _decode_checkpoint(self._backend, payload)
            number = self.manager.register(payload)
            self._saved()
            with self._lock:
                self._unstored += 1
        if round_[0].kind == "report":
            self.reports += 1
            rows = [report.metrics for report in round_]
            traces = [row.pop(TRACES, {}) for row in rows]
            result = RoundResult(rows, traces, self.manager.latest_id, complete)
        self._closed += 1
        settle = partial(self._settle, number, payload, round_[0].metrics, result)
        self._writer.put(settle, stores=payload is not None)

    def _settle(self, number: int, payload: bytes | None, metrics: dict[str, Any], result: RoundResult | None) -> None:
        """Store a round's checkpoint, then make it visible to the user. The writer's thread."""
        if payload is not None:
            self.manager.store(number, payload, metrics)
        with self._lock:
            self._settled += 1
            self._unstored -= payload is not None
        if result is not None:
            self._complete.put(result)
        self._let_continue()

    def _let_continue(self, *more: tuple[int, Callable[[], None]], everyone: bool = False) -> None:
        """Acknowledge the reports that need not wait any more."""
        with self._lock:
            self._waiting += more
            for number, acknowledge in list(self._waiting):
                if everyone or self._is_stored(number):
                    acknowledge()
                    self._waiting.remove((number, acknowledge))  # after it, because Ctrl-C can come between the two

    def _is_stored(self, number: int) -> bool:
        return number <= self._settled + UNSTORED_ROUNDS or not self._unstored

    def keeps_ranks_waiting(self) -> bool:
        """Whether ranks wait for the storage, which the engine's thread asks several times a
        second. Storage that takes too long ends the run."""
        self._writer.check_time()
        return bool(self._waiting) and self._unstored > 0

    # -- the user's thread ----------------------------------------------------------------------------

    def next_round(self, timeout: float) -> RoundResult | None:
        """Take the next round, None at the end. Raise queue.Empty after the timeout."""
        result = self._complete.get(timeout=timeout)
        if result is None:
            self._complete.put(None)
        return result

    def take_unfetched(self) -> list[RoundResult]:
        """Remove and return the rounds that are complete now."""
        found: list[RoundResult] = []
        try:
            while (result := self.next_round(0)) is not None:
                found.append(result)
        except queue.Empty:  # the run has not ended
            pass
        return found


def _decode_checkpoint(backend: Backend, payload: bytes) -> bytes:
    """Return a checkpoint that a worker has encoded as the user gave it."""
    if backend.decode_data is Backend.decode_data or is_directory(payload):
        return payload
    content = Checkpoint.from_bytes(payload, trusted=True).to_dict()
    return Checkpoint.from_dict(backend.decode_data(content)).to_bytes(dumps=dumps)
