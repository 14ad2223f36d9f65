"""Keep what the driver knows about each worker, and calls that are not answered yet. Driver."""

from __future__ import annotations

import itertools
import logging
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Literal, TypeVar

from raysgd.core.channel import messages
from raysgd.core.decisions.gpu_failures import MOST_FAILURES, GpuFailures
from raysgd.core.measures.progress import Progress
from raysgd.core.outcomes import Failed, GpuFault, Interrupted, Ok, Outcome, WorkerFailed
from raysgd.core.snapshot import Snapshot, SnapshotStore
from raysgd.engine.worker_info import Leaver, Stage, WorkerInfo
from raysgd.workers.events import CallEnded, Event, MessageReceived, WorkerEnded, WorkerStarted
from raysgd.workers.worker_group import WorkerGroupProtocol

logger = logging.getLogger("raysgd")

OnReport = Callable[[messages.FunctionReport, Any, Callable[[], None]], None]
AnswerT = TypeVar("AnswerT", messages.BoundaryAnswer, messages.StackReport)

# What the engine does, beyond waiting for a call: it recovers from a failure; makes a planned change, in which workers leave, or
# join only (growth), or passes a state on (agreement) and connects the ranks (rendezvous) for either of them, within it; waits for
# the ranks of a call that an error has ended. A growth is entered within its change.
Phase = Literal["recovery", "change", "growth", "agreement", "rendezvous", "interruption"]
During = Callable[[Phase], AbstractContextManager[object]]

ASKED_AGAIN_S = 10.0  # about the same machine
AWAY_S = 1.0  # beyond the time that a wait was to take
KILLED_S = 10.0
LOOK_S = 0.2
# Answers that came too late for their request are dropped when there are this many.
ANSWERS_AT_MOST = 10_000


class WorkerTable:
    """Owns what is known about each worker, the workers' replies and answers, and the newest
    snapshot.

    Events change it in `pump`; a new generation, a call, a kill and a dismissal change it through
    the methods below. Never decides what to do about a failure."""

    def __init__(
        self,
        group: WorkerGroupProtocol,
        *,
        silent_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        on_progress: Callable[[WorkerInfo], None] = lambda info: None,
        on_report: OnReport = lambda message, body, acknowledge: acknowledge(),
        during: During = nullcontext,
    ) -> None:
        self.group, self.during, self.real_clock = group, during, clock
        self._away_s, self._back_at = 0.0, -math.inf
        self._asking_since: float | None = None  # when the first call after the last look was given
        self.snapshots, self.gpu_failures = SnapshotStore(), GpuFailures()
        self.silent_s = silent_s  # after so much silence, a process is stopped, whatever it does
        self._on_progress, self._on_report = on_progress, on_report
        self._workers: dict[str, WorkerInfo] = {}
        self._members: list[str] | None = None  # in rank order, until they change
        self._open: list[weakref.ref[OpenCalls]] = []
        self._answers: deque[tuple[str, messages.BoundaryAnswer | messages.StackReport]] = deque(maxlen=ANSWERS_AT_MOST)
        self._cancelled_by: BaseException | None = None
        self._numbers = itertools.count(1)
        self._inbox: deque[Event] = deque()
        self._failed_nodes: dict[str, float] = {}  # and when each was asked
        self._replies: dict[int, Outcome] = {}
        self._asked: dict[int, str] = {}
        group.listener = self._take

    # -- time -----------------------------------------------------------------------------------------

    def clock(self) -> float:
        """A time that does not pass while this process is stopped (Ctrl-Z, a suspended machine),
        because no worker is late for that."""
        return self.real_clock() - self._away_s

    def silent_for(self, worker: str) -> float:
        """For how long the worker has sent nothing while this process ran."""
        return min(self.group.silent_for(worker), self.clock() - self._back_at)

    # -- workers --------------------------------------------------------------------------------------

    def __getitem__(self, worker: str) -> WorkerInfo:
        return self._workers[worker]

    def get(self, worker: str) -> WorkerInfo | None:
        return self._workers.get(worker)

    def members(self) -> list[str]:
        """The workers of the current generation, in rank order. Any thread may call this."""
        members = self._members
        if members is None:
            infos = [info for info in list(self._workers.values()) if info.in_group]
            members = self._members = [info.worker for info in sorted(infos, key=lambda info: info.rank or 0)]
        return list(members)

    def progress_of(self, workers: Iterable[str]) -> dict[str, Progress]:
        return {worker: self._workers[worker].progress for worker in workers}

    def failed(self) -> list[WorkerInfo]:
        """The workers that have failed and have not been dismissed yet."""
        return [info for info in list(self._workers.values()) if info.ended is not None]

    def launch(self, count: int) -> list[str]:
        return self._expect_starts(self.group.launch(count))

    def adopt(self) -> list[str]:
        """Adopt the workers that an earlier driver has left. Their connections follow."""
        return self._expect_starts(self.group.adopt())

    def _expect_starts(self, workers: list[str]) -> list[str]:
        now = self.clock()
        self._workers |= {worker: WorkerInfo(worker, since=now, moved_at=now) for worker in workers}
        return workers

    def new_workers(self) -> list[WorkerInfo]:
        """The workers that are not in the group, nor joining it."""
        return [info for info in list(self._workers.values()) if info.stage < Stage.JOINING]

    def set_stage(self, worker: str, stage: Stage) -> None:
        """Note that a worker that is not in the group has come to this stage."""
        info = self._workers[worker]
        info.stage = stage
        if stage is Stage.READY:
            info.since = self.clock()

    def set_leaver(self, worker: str, leaver: Leaver | None) -> None:
        """Note that a member is to leave, or that it stays."""
        self._workers[worker].leaver = leaver

    def dismiss(self, *workers: str) -> None:
        for worker in workers:
            info = self._workers.pop(worker, None)
            if info is not None and info.broken is not None:
                self._note_gpu_failure(info, info.broken.fault)
            self._members = None
            self._note_change(worker)
            self.group.dismiss(worker)

    def _note_gpu_failure(self, info: WorkerInfo, fault: GpuFault | None) -> None:
        if fault is None or fault.by_kernel:
            return
        count = self.gpu_failures.note(info.gpus, known=info.gpu_failures)
        if info.gpu_failures < count == MOST_FAILURES:
            logger.warning(
                "%s has failed %d times: raysgd starts no more workers on it. Look for its errors (nvidia-smi -q, and Xid in dmesg) "
                "on that machine, and drain the node or replace the GPU",
                info.name_gpu(),
                count,
            )

    def park_if_excluded(self, worker: str) -> bool:
        """Return whether a worker whose process is up must not use its GPU. It is no worker of the
        table any more then, but keeps that GPU until the group stops: otherwise, Ray would give it
        to the next one."""
        info = self._workers[worker]
        if info.stage < Stage.UP:
            return False
        if not self.gpu_failures.exclude(info.gpus):
            info.gpu_failures = self.gpu_failures.count(info.gpus)
            return False
        del self._workers[worker]
        logger.warning(
            "%s has failed too often, and a new worker was started on it. This worker keeps the GPU without using it, so that Ray does "
            "not give it to another worker of this trainer",
            info.name_gpu(),
        )
        return True

    def kill(self, worker: str, reason: str, why: str, *, hung_at: tuple[str, int] | None = None) -> None:
        """End a worker that blocks the others. Its failure will have this reason."""
        if worker in self._workers:  # a call that was made from within the running one may have dismissed it
            self._workers[worker].killed_for = WorkerFailed(why, reason, hung_at=hung_at)
            self.group.kill(worker)

    def end_unreported(self, workers: Iterable[str]) -> None:
        """Count workers as failed that were killed, but whose exit was never reported."""
        for worker in workers:
            self._workers[worker].ended = WorkerEnded(worker, "it was killed, and its exit was never reported")
            self._note_change(worker)

    def cancel(self, error: BaseException | None) -> None:
        """Make the running call's next wait raise `error`; None withdraws that. For any thread."""
        self._cancelled_by = error

    # -- generations ----------------------------------------------------------------------------------

    def expect_ranks(self, workers: Sequence[str]) -> None:
        """Set the ranks that new workers will have, because errors in their set-up name them."""
        for rank, worker in enumerate(workers):
            if not self._workers[worker].in_group:
                self._workers[worker].rank = rank

    def enter_group(self, workers: Sequence[str]) -> None:
        """Note that these are the members of a new generation, by rank."""
        for rank, worker in enumerate(workers):
            info = self._workers[worker]
            info.rank, info.stage = rank, Stage.MEMBER
        self._members = None

    def set_unfinished(self, worker: str, story: str) -> None:
        """Note what the worker did not finish in time."""
        self._workers[worker].unfinished = story

    # -- calls ----------------------------------------------------------------------------------------

    def begin_run(self, worker: str, method: str) -> None:
        """Note that a user call begins here: results of an earlier one do not count for it."""
        info = self._workers[worker]
        info.progress, info.partial = info.progress.at(method), None

    def expect(self, worker: str, call: int) -> None:
        """Note that the worker was just given a call, by the group's `submit`."""
        info = self._workers[worker]
        self._asked[call] = worker
        if self._asking_since is None:
            self._asking_since = self.real_clock()
        info.moved_at, info.busy, info.last_call, info.is_exact = self.clock(), call, call, False

    def open_calls(self, on_trouble: Callable[[], None]) -> OpenCalls:
        """Make an object that makes calls and waits for them. `on_trouble` is called once, when the
        first of them fails: peers may be waiting for that rank."""
        calls = OpenCalls(self, on_trouble)
        self._open = [*(each for each in self._open if each() is not None), weakref.ref(calls)]
        return calls

    def note_progress(self, workers: Iterable[str]) -> None:
        """Note that these workers do not hang at the moment."""
        for worker in workers:
            self._workers[worker].moved_at = self.clock()

    def reply(self, call: int) -> Outcome | None:
        """The call's outcome, once, or None. A failed worker's call has failed."""
        outcome = self._replies.pop(call, None)
        if outcome is not None:
            self._asked.pop(call, None)
            return outcome
        info = self._workers.get(self._asked.get(call, ""))
        if info is None or info.ended is not None:
            self._asked.pop(call, None)
            return self.failure_of(info)
        return None

    def forget(self, calls: Iterable[int]) -> None:
        """Drop the outcomes of these calls, also of those that have not ended yet."""
        for call in calls:
            self._asked.pop(call, None)
            self._replies.pop(call, None)

    def failure_of(self, info: WorkerInfo | None) -> WorkerFailed:
        """The outcome of a call to a worker that has failed."""
        if info is None or info.ended is None:
            return WorkerFailed("it was dismissed")
        if info.broken is not None:
            return info.broken
        if info.killed_for is not None:
            failure = info.killed_for
        elif self._has_failed(info.node):
            failure = WorkerFailed(f"its node {info.machine} failed", "node failure")
        else:
            failure = WorkerFailed(info.ended.cause, "preemption" if info.notice else info.ended.reason)
        return replace(failure, value=info.partial, progress=info.progress)

    def _has_failed(self, node: str) -> bool:
        """Whether the machine has failed. Ray is asked, and the machine, which takes a moment if it
        does not answer: so not at once again for each of its workers."""
        if not node or self.clock() - self._failed_nodes.get(node, -math.inf) < ASKED_AGAIN_S:
            return bool(node)
        if self.group.is_node_alive(node):
            return False
        self._failed_nodes[node] = self.clock()
        return True

    def _note_change(self, worker: str) -> None:
        """Note that a call to this worker may have ended."""
        for each in self._open:
            calls = each()
            if calls is not None:
                calls.note(worker)

    # -- messages -------------------------------------------------------------------------------------

    def request_stacks(self, workers: Iterable[str]) -> int:
        """Ask workers where they are. Return the number that their answers will have."""
        number = self.next_number()
        message = messages.StackRequest(number)
        for worker in workers:
            self.group.send(worker, message)
        return number

    def next_number(self) -> int:
        """Choose a number that no earlier request has, so that answers to older requests do not
        count."""
        return next(self._numbers)

    def take_answers(self, kind: type[AnswerT], number: int) -> list[tuple[str, AnswerT]]:
        """Remove and return the answers to one request that have arrived, with their workers.
        Answers to older requests of the same type stay, because another waiter may still want
        them."""
        answers: list[tuple[str, AnswerT]] = []
        for _ in range(len(self._answers)):
            worker, answer = self._answers.popleft()
            if isinstance(answer, kind) and answer.round == number:
                answers.append((worker, answer))
            else:
                self._answers.append((worker, answer))
        return answers

    # -- events ---------------------------------------------------------------------------------------

    def pump(self, timeout: float) -> int:
        """Process what has happened, and wait up to `timeout` for the first event. Return the
        number of events. A cancelled call ends here, because every wait of the engine calls
        this."""
        asking_since, self._asking_since = self._asking_since, None
        began, wait_s = self.real_clock() if asking_since is None else asking_since, 0.0 if self._inbox else timeout
        self._inbox.extend(self.group.poll(wait_s))
        away_s = self.real_clock() - began - wait_s
        if away_s > AWAY_S:
            self._away_s += away_s
            self._back_at = self.clock()
        count = len(self._inbox)
        while self._inbox:  # one by one, so that an error in between (a callback's, Ctrl-C) does not lose the others
            self._take(self._inbox.popleft())
        self.raise_cancelled()
        return count

    def raise_cancelled(self) -> None:
        """Raise the error that ends the running call, if it was cancelled."""
        error, self._cancelled_by = self._cancelled_by, None
        if error is not None:
            raise error

    def _take(self, event: Event) -> None:
        info = self._workers.get(event.worker)
        message = event.message if isinstance(event, MessageReceived) else None
        if isinstance(event, MessageReceived) and isinstance(message, messages.SnapshotUpload):
            self.snapshots.offer(Snapshot(event.body, message.progress, message.call, message.partial))
        elif isinstance(event, MessageReceived) and isinstance(message, messages.FunctionReport):
            self._on_report(message, event.body, event.acknowledge)
        if info is None:
            return
        if isinstance(event, WorkerStarted):
            info.stage, info.node, info.pid = max(info.stage, Stage.UP), event.node, event.pid
            info.address, info.local = event.address, event.local
            info.gpus = tuple((event.node, number) for number in event.gpus)
            info.moved_at = self.clock()
        elif isinstance(event, WorkerEnded):
            info.ended = info.ended or event  # a broken GPU is known before its process has ended
            self._note_change(event.worker)
        elif isinstance(event, CallEnded):
            self._note_call_end(info, event)
        else:
            self._receive_message(info, event.message)

    def _note_broken_gpu(self, info: WorkerInfo, outcome: WorkerFailed) -> None:
        """Note that a worker's GPU is broken. Its process ends itself, which can take long."""
        uuid = outcome.fault.uuid if outcome.fault is not None else ""
        cause = f"{info.name_gpu(uuid)}: {outcome.cause}"
        info.broken = replace(outcome, cause=cause, value=info.partial)
        info.ended = WorkerEnded(info.worker, cause, outcome.reason)
        self._note_change(info.worker)

    def _note_call_end(self, info: WorkerInfo, event: CallEnded) -> None:
        if isinstance(event.outcome, WorkerFailed):
            self._note_broken_gpu(info, event.outcome)
            return
        if event.call in self._asked:  # otherwise nothing waits for it any more
            self._replies[event.call] = event.outcome
            self._note_change(event.worker)
        if info.busy == event.call:
            info.busy = None
        info.moved_at = self.clock()
        if not isinstance(event.outcome, Failed) or event.outcome.progress != Progress():
            info.progress, info.is_exact = event.outcome.progress, event.call == info.last_call

    def _receive_message(self, info: WorkerInfo, message: messages.Message) -> None:
        if isinstance(message, messages.ProgressReport):
            if message.call < info.last_call or (message.call == info.last_call and info.busy is None):
                return  # the call's answer arrived first, because a large one comes over another connection
            if message.progress != info.progress:
                info.moved_at = self.clock()
            info.progress, info.partial = message.progress, message.partial
            self._on_progress(info)
            self.raise_cancelled()  # also here, because `pump` is not called while the inline worker trains
        elif isinstance(message, messages.FunctionReport | messages.Moved):
            info.moved_at = self.clock()  # a slow transfer is not a hang
        elif isinstance(message, messages.PreemptionNotice):
            info.notice = True
            rank = "a new worker" if info.rank is None else f"rank {info.rank}"
            logger.warning(
                "preemption: %s on node %s received SIGTERM, so its machine will be stopped", rank, info.machine
            )
        elif isinstance(message, messages.BoundaryAnswer | messages.StackReport):
            self._answers.append((info.worker, message))


class OpenCalls:
    """Calls for which one of the engine's waits is waiting, at most one for each worker, and the
    outcomes of those that have ended. Owns which workers something has happened to since the last
    look, so that a look costs nothing for the others."""

    def __init__(self, table: WorkerTable, on_trouble: Callable[[], None]) -> None:
        self._table, self._on_trouble = table, on_trouble
        self.running: dict[str, int] = {}
        self.outcomes: dict[str, Outcome] = {}
        self.troubled_at: float | None = None
        self._changed: dict[str, None] = {}  # the first one first

    def expect(self, worker: str, call: int) -> None:
        """Wait for a call that the worker was just given, by the group's `submit`."""
        self._table.expect(worker, call)
        self.running[worker] = call
        self.note(worker)  # it may have ended already

    def note(self, worker: str) -> None:
        """Note that something has happened to this worker."""
        self._changed[worker] = None

    def collect(self, seen: Callable[[str, Outcome], Outcome] = lambda worker, outcome: outcome) -> None:
        """Take the outcomes of calls that have ended, as `seen` returns them."""
        while self._changed:
            del self._changed[worker := next(iter(self._changed))]
            outcome = self._table.reply(self.running[worker]) if worker in self.running else None
            if outcome is not None:
                del self.running[worker]
                self.outcomes[worker] = outcome = seen(worker, outcome)
                if not isinstance(outcome, Ok) and not (isinstance(outcome, Interrupted) and outcome.asked):
                    self.note_trouble()

    def note_trouble(self) -> None:
        """Note that a call has failed, or is about to."""
        if self.troubled_at is None:
            self.troubled_at = self._table.clock()
            self._on_trouble()
