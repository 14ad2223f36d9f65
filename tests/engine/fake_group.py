"""A group without processes, and with it the engine's table of workers, for tests of the engine's parts."""

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from raysgd.core.channel.messages import ProgressReport, StackReport, StackRequest
from raysgd.core.control import Control
from raysgd.core.measures.progress import Progress
from raysgd.core.outcomes import Interrupted, Ok, Outcome
from raysgd.core.protocols import SingleWorkerBackend
from raysgd.engine.worker_table import WorkerTable
from raysgd.workers.cluster.nodes import Room
from raysgd.workers.events import CallEnded, Event, MessageReceived, WorkerEnded, WorkerStarted
from raysgd.workers.worker_group import WorkerGroupProtocol

__all__ = [
    "FakeGroup",
    "Interrupted",
    "MessageReceived",
    "Ok",
    "SingleWorkerBackend",
    "StackReport",
    "WorkerEnded",
    "reporting",
    "started",
]


class FakeGroup(WorkerGroupProtocol):
    """Records what it is asked for, and reports the `events` that a test adds.

    free      how many more workers the cluster can hold
    outcomes  of calls, by their verbs; Ok for others; None: calls do not end
    silence   for how many seconds each worker has sent nothing
    dead      machines that have failed
    stacks    what workers answer when they are asked for their stacks
    """

    elastic, term = True, 0

    def __init__(self, free: int = 4, names: Iterable[str] = (), **outcomes: Outcome | None) -> None:
        self.listener: Callable[[Event], None] = lambda event: None
        self.free, self.launched, self.outcomes = free, 0, outcomes
        self.events: list[Event] = []
        self.silence: dict[str, float] = defaultdict(float)
        self.stacks: dict[str, tuple[str, ...]] = {}
        self.dead, self.looked = set[str](), list[str]()
        self.asked, self.killed, self.dismissed = 0, list[str](), list[str]()
        self._names = itertools.chain(names, (f"w{number}" for number in itertools.count(1)))
        self._calls = itertools.count(1)

    def table(self, clock: Callable[[], float] = time.monotonic) -> WorkerTable:
        return WorkerTable(self, clock=clock)  # type: ignore[arg-type]

    def is_node_alive(self, node: str) -> bool:
        self.looked.append(node)
        return node not in self.dead

    def launch(self, count: int) -> list[str]:
        self.free -= count
        self.launched += count
        return [next(self._names) for _ in range(count)]

    def submit(self, worker: str, verb: str, arguments: dict[str, Any], *, generation: int = 0) -> int:
        call, outcome = next(self._calls), self.outcomes.get(verb, Ok())
        if outcome is not None:
            self.events.append(CallEnded(worker, call, outcome))
        return call

    def poll(self, timeout: float) -> list[Event]:
        if not self.events:
            time.sleep(min(timeout, 0.05))
        events, self.events = self.events, []
        return events

    def send(self, worker: str, message: Any) -> bool:
        if isinstance(message, StackRequest):
            self.asked += 1
            if worker in self.stacks:
                answer = StackReport(message.round, self.stacks[worker])
                self.events.append(MessageReceived(worker, answer))
        return True

    def silent_for(self, worker: str) -> float:
        return self.silence[worker]

    def kill(self, worker: str) -> None:
        self.killed.append(worker)

    def dismiss(self, worker: str) -> None:
        self.dismissed.append(worker)

    def room(self) -> Room:
        return Room(self.free, self.free + self.launched, needs={"CPU": (1, self.free)})

    def stop(self) -> None:
        """There is no process to end."""


def started(worker: str, address: str = "", *, gpu: str = "") -> WorkerStarted:
    """Return the event that a worker's process has started, with this GPU if Ray has given it one."""
    return WorkerStarted(worker, "node", 1, address, gpus=(gpu,) if gpu else ())


def reporting(group: FakeGroup, worker: str, call: int, rank: int, ranks: int, clock: Callable[[], float]) -> Control:
    """Return the control of a worker whose reports reach the group."""

    def publish(progress: Progress, partial: Any) -> None:
        group.events.append(MessageReceived(worker, ProgressReport(call, progress)))

    control = Control(publish, clock=clock)
    control.set_rank(rank, ranks)
    return control
