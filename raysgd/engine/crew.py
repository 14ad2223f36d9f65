"""Who is there, and what they have said. Turns a group's events into the state of its members."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from raysgd.core.messages import (
    BoundaryAnswer,
    FunctionReport,
    Message,
    PreemptionNotice,
    ProgressReport,
    SnapshotUpload,
    StackReport,
    StackRequest,
)
from raysgd.hang import Report, culprits, unfinished
from raysgd.outcomes import Failed, Lost, Ok, Outcome
from raysgd.progress import Progress
from raysgd.snapshot import Snapshot, SnapshotKeeper
from raysgd.workers.events import Arrived, Event, Gone, Heard, Replied

__all__ = ["SILENT_S", "Crew", "Group", "Member"]

AnswerT = TypeVar("AnswerT", BoundaryAnswer, StackReport)

# A listener says "alive" every second; one that missed two of them does not answer any more.
SILENT_S = 2.5
KILLED_S = 10.0


class Group(Protocol):
    """What the engine needs of workers, in Ray or in this process."""

    elastic: bool
    listener: Callable[[Event], None]

    def launch(self, count: int) -> list[str]: ...
    def submit(self, worker: str, verb: str, arguments: dict[str, Any], *, generation: int = 0) -> int: ...
    def poll(self, timeout: float) -> list[Event]: ...
    def tell(self, worker: str, message: Message) -> bool: ...
    def silent_for(self, worker: str) -> float: ...
    def set_patience(self, unreachable_s: float) -> None: ...
    def kill(self, worker: str) -> None: ...
    def dismiss(self, worker: str, *, force: bool = False) -> None: ...
    def refer(self, worker: str, verb: str, arguments: dict[str, Any]) -> Any: ...
    def pack(self, value: Any) -> Any: ...
    def room(self) -> int: ...
    def holds_at_most(self) -> int: ...
    def wanting(self, count: int) -> str: ...
    def draining(self) -> set[str]: ...
    def lives(self, node: str) -> bool: ...
    def releasing(self) -> AbstractContextManager[None]: ...
    def stop(self, *, force: bool = False) -> None: ...


@dataclass
class Member:
    """One worker as the driver knows it. `holds_state`: it has the group's weights, not just its own first ones."""

    worker: str
    node: str = ""
    pid: int = 0
    rank: int | None = None
    arrived: bool = False
    built: bool = False
    seated: bool = False
    holds_state: bool = False
    notice: bool = False
    progress: Progress = field(default_factory=Progress)
    partial: dict[str, Any] | None = None
    moved_at: float = 0.0
    gone: Gone | None = None
    busy: int | None = None
    last_call: int = -1


class Crew:
    """Owns the members and their replies. `pump` is the only place where events are taken in."""

    def __init__(
        self, group: Group, target: int, *, silent_s: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.group, self.clock = group, clock
        self.silent_s = silent_s
        self.target = target
        self.current_call = 0
        self.members: dict[str, Member] = {}
        self.snapshots = SnapshotKeeper()
        self.answers: list[tuple[str, BoundaryAnswer | StackReport]] = []
        self.on_progress: Callable[[Member], None] = lambda member: None
        self.on_message: Callable[[FunctionReport, Any], None] = lambda message, body: None
        self.cancelled_by: BaseException | None = None
        self.blame: dict[str, str] = {}
        self.unfinished: dict[
            str, str
        ] = {}  # workers whose own code did not end in time, which a stopped process does not show
        self.rounds = itertools.count(1)
        self._inbox: deque[Event] = deque()
        self._replies: dict[int, Outcome] = {}
        self._asked: dict[int, str] = {}
        group.listener = self._take

    # -- members --------------------------------------------------------------------------------------

    def launch(self, count: int) -> list[str]:
        workers = self.group.launch(count)
        for worker in workers:
            self.members[worker] = Member(worker, moved_at=self.clock())
        return workers

    def dismiss(self, worker: str) -> None:
        self.members.pop(worker, None)
        self.group.dismiss(worker, force=True)

    def seated(self) -> list[str]:
        """The members of the generation that stands, in rank order."""
        members = [m for m in self.members.values() if m.seated]
        return [m.worker for m in sorted(members, key=lambda m: m.rank or 0)]

    def fallen(self) -> list[Member]:
        return [m for m in self.members.values() if m.gone is not None]

    # -- calls ----------------------------------------------------------------------------------------

    def submit(self, worker: str, verb: str, arguments: dict[str, Any], *, generation: int = 0) -> int:
        member = self.members[worker]
        member.moved_at = self.clock()
        call = self.group.submit(worker, verb, arguments, generation=generation)
        self._asked[call] = worker
        member.busy = member.last_call = call
        return call

    def reply(self, call: int) -> Outcome | None:
        """The call's outcome, once; a worker that is gone has lost it."""
        outcome = self._replies.pop(call, None)
        if outcome is not None:
            self._asked.pop(call, None)
            return outcome
        member = self.members.get(self._asked.get(call, ""))
        if member is None or member.gone is not None:
            self._asked.pop(call, None)
            return self.lost(member)
        return None

    def ask(
        self,
        workers: Iterable[str],
        verb: str,
        arguments: Mapping[str, Any] | Callable[[str], dict[str, Any]],
        *,
        limit_s: float,
        generation: int = 0,
        on_trouble: Callable[[], None] = lambda: None,
    ) -> dict[str, Outcome]:
        """One call on several workers. Who does not answer within the limit, or is stopped, is killed, and lost.

        `on_trouble` is called once, at the first outcome that is not Ok: peers may be waiting for that rank.
        """
        calls = {}
        for worker in workers:
            given = arguments(worker) if callable(arguments) else dict(arguments)
            calls[worker] = self.submit(worker, verb, given, generation=generation)
        outcomes: dict[str, Outcome] = {}
        deadline = self.clock() + limit_s
        troubled = False
        while True:
            for worker, call in calls.items():
                if worker not in outcomes and (outcome := self.reply(call)) is not None:
                    outcomes[worker] = outcome
                    if not isinstance(outcome, Ok) and not troubled:
                        troubled = True
                        on_trouble()
            if len(outcomes) == len(calls):
                return {worker: outcomes[worker] for worker in calls}
            late = [worker for worker in calls if worker not in outcomes]
            for worker in late:
                self.end_if_silent(worker, verb)
            if self.clock() > deadline:
                self._end_the_late(late, verb, limit_s)
                if not troubled:
                    troubled = True
                    on_trouble()  # whoever only waits for them falls out by itself
                deadline = self.clock() + KILLED_S
            self.pump(0.2)

    def end_if_silent(self, worker: str, verb: str) -> None:
        """A process that is stopped does not even say "alive", which a long set-up does beside its work."""
        if worker not in self.blame and self.group.silent_for(worker) > self.silent_s:
            report = self._report(worker, None)
            self.kill(worker, "hang", unfinished(report, verb, self.silent_s))

    def _end_the_late(self, late: Iterable[str], verb: str, limit_s: float) -> None:
        """Those that do not even say "alive"; all, when all do. Who was killed before, and is not gone, is given up."""
        late = list(late)
        for worker in [w for w in late if w in self.blame]:
            self.members[worker].gone = Gone(worker, "it was killed, and its end was never told")
        late = [worker for worker in late if worker not in self.blame]
        silent = [worker for worker in late if self.group.silent_for(worker) > SILENT_S]
        for worker, story in self.stuck(silent or late, verb, limit_s).items():
            self.kill(worker, "hang", story)

    def stuck(self, workers: Sequence[str], verb: str, limit_s: float) -> dict[str, str]:
        """Return, for each of these that is still busy, what it did not finish in time, and where it is. Those that keep the
        others waiting come first."""
        stacks = self._stacks(workers)
        reports = {w: self._report(w, stacks.get(w)) for w in workers if self.members[w].busy is not None}
        guilty = culprits(reports) or list(reports)
        waiting = [worker for worker in reports if worker not in guilty]
        first = ", ".join(f"rank {reports[worker].rank}" for worker in guilty)
        told = {worker: unfinished(reports[worker], verb, limit_s) for worker in guilty}
        self.unfinished |= {worker: told[worker] for worker in guilty if reports[worker].stack is not None}
        return told | {worker: f"waited for {first} in '{verb}' for {limit_s:g} s" for worker in waiting}

    def _report(self, worker: str, said: StackReport | None) -> Report:
        member = self.members[worker]
        return Report(
            rank=member.rank,
            node=member.node[:8],
            stack=None if said is None else said.frames,
            silent_s=self.group.silent_for(worker),
        )

    def _stacks(self, workers: Sequence[str]) -> dict[str, StackReport]:
        """Ask where these are, and wait a little: their listeners answer at once, unless the whole process is stopped."""
        number = next(self.rounds)
        for worker in workers:
            self.group.tell(worker, StackRequest(number))
        found: dict[str, StackReport] = {}
        deadline = self.clock() + SILENT_S
        while len(found) < len(workers) and self.clock() < deadline:
            self.pump(0.05)
            found |= {worker: answer for worker, answer in self.take_answers(StackReport) if answer.round == number}
        return found

    def take_answers(self, kind: type[AnswerT]) -> list[tuple[str, AnswerT]]:
        """Return the answers of this type that have come, with their workers. Each is returned once."""
        taken = [(worker, answer) for worker, answer in self.answers if isinstance(answer, kind)]
        self.answers = [(worker, answer) for worker, answer in self.answers if not isinstance(answer, kind)]
        return taken

    def forget(self, calls: Iterable[int]) -> None:
        """These calls' outcomes are of no interest any more."""
        for call in calls:
            self._asked.pop(call, None)
            self._replies.pop(call, None)

    def kill(self, worker: str, reason: str, why: str) -> None:
        """Ends a worker that holds the others up; its loss will carry the reason."""
        self.blame[worker] = f"{reason}|{why}"
        self.group.kill(worker)

    def lost(self, member: Member | None) -> Lost:
        if member is None or member.gone is None:
            return Lost("it was dismissed")
        reason, _, why = self.blame.get(member.worker, "").partition("|")
        if not reason:
            reason, why = member.gone.reason, member.gone.cause
            if member.node and not self.group.lives(member.node):
                reason, why = "node loss", f"its node {member.node[:8]} is gone"
            elif member.notice:
                reason = "preemption"
        return Lost(why, reason, member.partial, member.progress)

    # -- events ---------------------------------------------------------------------------------------

    def pump(self, timeout: float) -> int:
        """Takes in what has happened, waiting up to `timeout` for it; the number of events. A cancelled call ends here:
        every wait of the engine's comes by."""
        self._inbox.extend(self.group.poll(0.0 if self._inbox else timeout))
        count = len(self._inbox)
        while self._inbox:  # one by one: an error on the way (a callback's, Ctrl-C) must not lose the others
            self._take(self._inbox.popleft())
        self._raise_cancelled()
        return count

    def _raise_cancelled(self) -> None:
        error, self.cancelled_by = self.cancelled_by, None
        if error is not None:
            raise error

    def _take(self, event: Event) -> None:
        member = self.members.get(event.worker)
        message = event.message if isinstance(event, Heard) else None
        if isinstance(event, Heard) and isinstance(message, SnapshotUpload):
            self.snapshots.offer(Snapshot(event.body, message.progress, message.call, message.partial))
        elif isinstance(event, Heard) and isinstance(message, FunctionReport):
            self.on_message(message, event.body)
        if member is None:
            return
        if isinstance(event, Arrived):
            member.arrived, member.node, member.pid = True, event.node, event.pid
            member.moved_at = self.clock()
        elif isinstance(event, Gone):
            member.gone = event
        elif isinstance(event, Replied):
            self._replied(member, event)
        else:
            self._heard(member, event.message)

    def _replied(self, member: Member, event: Replied) -> None:
        if event.call not in self._asked:
            return
        self._replies[event.call] = event.outcome
        if member.busy == event.call:
            member.busy = None
        member.moved_at = self.clock()
        if not isinstance(event.outcome, Failed) or event.outcome.progress != Progress():
            member.progress = event.outcome.progress

    def _heard(self, member: Member, message: Message) -> None:
        if isinstance(message, ProgressReport):
            if message.call < member.last_call:
                return  # of an earlier call: it was overtaken by that call's result, which came another way
            if message.progress != member.progress:
                member.moved_at = self.clock()
            member.progress, member.partial = message.progress, message.partial
            self.on_progress(member)
            self._raise_cancelled()  # here too: work in this very process does not come by `pump`
        elif isinstance(message, PreemptionNotice):
            member.notice = True
        elif isinstance(message, BoundaryAnswer | StackReport):
            self.answers.append((member.worker, message))
