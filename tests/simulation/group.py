"""Simulate worker processes on simulated nodes, behind the protocol through which the engine calls workers."""

from __future__ import annotations

import contextlib
import itertools
import math
import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

from raysgd.core.channel.blobs import Blob
from raysgd.core.channel.messages import Message, PreemptionNotice, ProgressReport, SnapshotUpload
from raysgd.core.control import Control
from raysgd.core.decisions.lease import LEASE_S, RENEW_EVERY_S, WITNESSED_S
from raysgd.core.measures.progress import Progress
from raysgd.core.outcomes import GpuFault, Outcome, WorkerFailed
from raysgd.errors import SupersededError
from raysgd.workers.calls import SMALL
from raysgd.workers.cluster.keeper import RENEWALS
from raysgd.workers.cluster.nodes import Room
from raysgd.workers.control_client import ControlClient
from raysgd.workers.events import CallEnded, Event, MessageReceived, WorkerEnded, WorkerStarted
from raysgd.workers.orphan import DriverContact, NamedHost
from raysgd.workers.replica_host import ReplicaHost
from raysgd.workers.transfer import AnyTransfer
from tests.simulation.network import DRIVER, Link, Network, NetworkError, ProcessGroup, SimBackend
from tests.simulation.replica import GpuError, SimReplica
from tests.simulation.world import Condition, Process, Wake, World

__all__ = ["CallDidNotEnd", "Large", "Node", "SimGroup", "Worker"]

HEARTBEAT_S = 1.0
UPLOADED_S = 2.0  # for the snapshot of a state that was loaded
WAITING = ["/torch/distributed/distributed_c10d.py:1 all_reduce"]
BUSY = ["script.py:1 train_batch"]


class Large(Blob):
    """Stands for an argument that is large."""

    def __len__(self) -> int:
        return SMALL


class CallDidNotEnd(AssertionError):
    """The driver is still waiting long after the last fault."""


class Node:
    """A machine, which has room for some workers, and can be drained or vanish."""

    def __init__(self, name: str, slots: int) -> None:
        self.name, self.slots = name, slots
        self.alive, self.draining, self.removed_at = True, False, 0.0
        self.workers: dict[Worker, None] = {}  # a dict, because a set has no order

    @property
    def free(self) -> int:
        return max(self.slots - len(self.workers), 0) if self.alive and not self.draining else 0


class SimClient(ControlClient):
    """The worker's end of the control channel without its socket. The library's own code handles the messages."""

    def __init__(self, worker: Worker) -> None:
        self._worker_process, self._worker = worker, worker.name
        self._abort, self._open = worker.backend.abort, True
        self._writable: Any = SimpleNamespace(select=lambda timeout: not worker.loses)
        self.generation = self.call = -1
        self._call_lock = threading.Lock()
        self.control = Control(self._publish, clock=worker.clock, changed=Condition(worker))  # type: ignore[arg-type]
        self.meet_driver()

    def meet_driver(self) -> None:
        worker = self._worker_process
        ways = {"stop": self.control.interrupt, "leave": self._abort, "end": worker.end_orphan}
        self.driver = DriverContact(worker.group.plan.orphan_s, worker.clock(), **ways)
        self.driver.calls = SimpleNamespace(put=lambda message: worker.free())  # type: ignore[assignment]

    def receive(self, message: Message) -> None:
        worker, before = self._worker_process, self.control.interrupted
        worker.strike("message")
        if worker.alive:
            self.driver.note_message(worker.clock())
            self._handle(message)
            worker.checker.received(worker, message, interrupted=self.control.interrupted and not before)

    def notice(self) -> None:
        self.control.notice = True
        self._send(PreemptionNotice())

    def _send(self, message: Message) -> None:
        self._worker_process.send(message)

    def _publish(self, progress: Progress, partial: dict[str, Any] | None) -> None:
        self._send(ProgressReport(self.call, progress, partial))  # without `brief`, because all metrics are numbers

    def _stack(self) -> list[str]:
        group = self._worker_process.backend.group
        return WAITING if group is not None and group.waits(self._worker_process) else BUSY


def find_fault(error: BaseException) -> GpuFault | None:
    """Replace what asks torch and the GPU."""
    return GpuFault() if isinstance(error, GpuError) else None


class Worker(Process):
    """One worker process. Calls run one at a time on its main task, while messages arrive."""

    def __init__(self, group: SimGroup, name: str, node: Node) -> None:
        super().__init__(group.world)
        self.group, self.name, self.node, self.checker = group, name, node, group.checker
        self.number = int(name[1:])
        self.gpu = str(min(set(range(len(node.workers) + 1)) - {int(each.gpu) for each in node.workers}))
        plan = self._plan = group.plan
        self.ahead_s = 0.0
        self.began_at: float | None = None
        self.backend = SimBackend(
            self.world,
            group.network,
            in_place=plan.in_place,
            shares=plan.shares,
            join_s=plan.limits.join_s,
            collective_s=plan.limits.collective_s,
            member=self,
        )
        self.client = SimClient(self)
        self.client.control.giving, self.client.control.take, self.client.control.ask = (
            self.giving,
            self.take,
            self.ask_driver,
        )
        kind = NamedHost if plan.orphan_s else ReplicaHost
        self.host = kind(self.backend, self.client.control, remote=False)
        self.host.find_fault = find_fault
        self.term = group.term
        self._adopters: list[SimGroup] = []
        self.replica: SimReplica | None = None
        self.slow = 1.0
        self.loses = False  # whether what it sends without waiting for an answer gets lost
        self.given_up = False
        self.lost = False  # whether the driver has seen the end of its control connection
        self.was_given_up = False  # or so by the driver before
        self.announced_at: float | None = None  # since when its machine is known to be stopped soon
        self.leave_by = 0.0
        self._calls: deque[tuple[int, int, str, dict[str, Any]]] = deque()
        self._idle: Wake | None = None
        link = partial(Link, self.world, group.network, node.name, late=plan.late)
        self._to_driver = link(0.003)
        self._bulk = link(0.05)
        self._replies = link(0.006)
        self._from_driver = link(0.003)
        self._requests = link(0.006)

    # -- life -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.began_at = self.world.now
        self.spawn(self._main)

    def clock(self) -> float:
        """Return what this process's clock shows."""
        return self.world.now + self.ahead_s

    def heard_at(self) -> float:
        """Return when the driver last received a heartbeat."""
        if self.began_at is None:
            return self.world.now
        ends = [self.world.now, self.stopped_at, self.died_at, self.group.network.blocked_at(self.node.name, DRIVER)]
        until = min(each for each in ends if each is not None)
        return max(self.began_at, until - (until - self.began_at) % HEARTBEAT_S)

    def _main(self) -> None:
        self.group.current[self.world.current()] = self
        self.point("process start")
        if not self.group.enlists(self):
            self.die("its driver is not the driver any more")
            self.point("process start")
        self._connect(self.world.now + LEASE_S)
        self._to_driver.send(partial(self.group.emit, WorkerStarted(self.name, self.node.name, 1, gpus=(self.gpu,))))
        while True:
            while not self._calls:
                if self._adopters and self.client.driver.since is not None:
                    self._adopted_by(self._adopters.pop(0))
                    continue
                self._idle = Wake(self)
                self._idle.wait()
            call, generation, verb, arguments = self._calls.popleft()
            self.client.begin(call)
            if verb in ("join", "warm"):
                self.client.generation = generation
            self.point(verb)
            outcome = self.host.perform(verb, arguments)
            self.point(f"{verb} ended")
            self._replies.send(partial(self.group.emit, CallEnded(self.name, call, outcome)))
            if isinstance(outcome, WorkerFailed):
                self._to_driver = self._replies  # the connection ends after what was sent on it
                self.die("its GPU is broken")
                self.world.hub.switch()  # does not return

    def _connect(self, until: float) -> None:
        """Connect to the driver. If its process is stopped, it does not answer."""
        while self.group.stopped_at() is not None:
            if self.world.now >= until:
                self._witness(self.group)
                self.die("it cannot connect to its driver")
                self.point("process start")
            self.sleep(0.1)

    # -- without a driver -----------------------------------------------------------------------------

    def driver_ended(self, group: SimGroup) -> None:
        """See the end of this driver's connection."""
        if self.alive and self.group is group and not self.client.driver.has_ended:
            self.client.driver.has_ended = True
            self._calls.clear()
            if self._plan.orphan_s:
                self.at(self.world.between(0.001, 0.02), partial(self._witness, self.group))
            self._look(self.client.driver)

    def driver_stopped(self) -> None:
        """Hear nothing more of the driver."""
        self.at(LEASE_S, partial(self._look, self.client.driver))

    def _look(self, driver: DriverContact) -> None:
        """Be the control thread, which looks now and then at when it has last heard of the driver."""
        if driver is not self.client.driver:
            return
        stopped_at = self.group.stopped_at()
        if not driver.has_ended and stopped_at is None:  # then it says that it lives
            driver.note_message(self.clock())
            return
        if stopped_at is not None and not driver.has_ended:
            driver.heard_at = stopped_at + self.ahead_s
        driver.look(self.clock(), holds_state=self.host.holds_state)
        if self.alive and driver.since is not None:
            self.strike("orphan")
        if self.alive:
            self.at(0.5, partial(self._look, driver))

    def _witness(self, group: SimGroup) -> None:
        group.keeper.witness(group.term, self.world.now)

    def end_orphan(self) -> None:
        self.checker.orphan_ends(self)
        self.die("no driver has come")

    def share(self, make: Callable[[], Any], giver: int) -> Any:
        """Take part in three broadcasts of what this rank makes, which is complete with the last one."""
        content = None
        for part in range(3):
            if (group := self.backend.group) is None:
                raise NetworkError("the process group was aborted")
            gives = group.members.index(self) == giver
            self.point("state" if gives else "load")
            given = make() if gives and not part else content
            content = group.collective(self, given, self.backend.collective_s)[giver]
            self.client.control.moved()
        return content

    def free(self) -> None:
        """Let the main task look at what it is asked for."""
        if self._idle is not None:
            self._idle()

    def ask_to_adopt(self, group: SimGroup) -> None:
        if self.alive:
            self._adopters.append(group)
            self.free()
        else:
            group.emit(WorkerEnded(self.name, "Ray reports that the actor died"))

    def _adopted_by(self, group: SimGroup) -> None:
        """Connect to another driver, and leave the one before."""
        self.point("adopt")
        if group.term <= self.term or group.gone or not group.enlists(self):
            return
        before, self.group, self.term = self.group, group, group.term
        before.emit(WorkerEnded(self.name, "another driver has taken it over", "takeover"))
        self.client.meet_driver()
        self.was_given_up = self.was_given_up or self.lost or self.given_up
        self.client.call, self.lost, self.given_up = -1, False, False
        if self.announced_at is not None:  # its driver does not know since when
            self.announced_at, self.leave_by = self.world.now, math.inf
        self.world.note("%s is adopted in term %d", self.name, self.term)
        self.checker.adopted(self)
        self._to_driver.send(partial(group.emit, WorkerStarted(self.name, self.node.name, 1, gpus=(self.gpu,))))
        if self.client.control.notice:
            self.client.notice()
        if group.stopped_at() is not None:
            self.driver_stopped()
        self.point("adopted")

    def die(self, why: str = "its process ended", *, silently: bool = False) -> None:
        """End the process. With `silently`, its machine vanishes, so that its peers do not notice."""
        if not self.alive:
            return
        super().die()
        self.world.note("%s ends (%s)", self.name, why)
        group = self.backend.group
        if group is not None:
            self.world.at(self.world.between(0.0, 0.002), lambda: group.leave(self, silently=silently))
        if not silently:  # otherwise the driver ends it when it has noticed
            self.group.giver_died(self)
        notice_s = self.world.between(0.5, 2.0) if silently else 0.0
        event = WorkerEnded(self.name, why, "network" if silently else "worker death")
        self._to_driver.send(partial(self.group.emit, event), at_least_s=notice_s)
        late = WorkerEnded(self.name, "Ray reports that the actor died")
        for adopter in self._adopters:
            self.world.at(self.world.between(0.05, 3.0), partial(adopter.emit, late))
        self.world.at(self.world.between(0.05, 3.0), partial(self.group.emit, late))
        self.world.at(self.world.between(0.0, 0.3), lambda: self.node.workers.pop(self, None))

    def lose_connection(self, why: str, reason: str, *, dies_in_s: float) -> None:
        """End the control connection: the driver sees it now, and the process later, when it ends itself."""
        if self.alive and not self.lost:
            self.lost = True
            self.group.emit(WorkerEnded(self.name, why, reason))
            self.at(dies_in_s, partial(self.driver_ended, self.group))

    def formed(self, group: ProcessGroup) -> None:
        self.checker.formed(self, group)
        self.point("formed")

    def strike(self, name: str) -> None:
        self.group.strike(self, name)

    def point(self, name: str) -> None:
        """Let the schedule inject a fault into this worker."""
        self.strike(name)
        if not self.alive:
            self.world.hub.switch()  # does not return
        if self.stopped_at is not None:
            self.sleep(0.0)

    def compute(self) -> None:
        self.sleep(self.world.between(0.5, 1.5) * self._plan.step_s * self.slow)

    # -- messages -------------------------------------------------------------------------------------

    def send(self, message: Message) -> None:
        group = self.group
        self._to_driver.send(lambda: self.lost or group.emit(MessageReceived(self.name, message)))

    def upload(self, message: SnapshotUpload, body: bytes) -> None:
        """Send a snapshot on a connection of its own. It arrives completely or not at all, and later than other messages: one
        that follows a load after seconds, as a large one does."""
        received, group = MessageReceived(self.name, message, body), self.group

        def arrive() -> None:
            if self.alive and not group.gone:
                group.emit(received)

        if not self.loses and message.call < 0:
            self.at(UPLOADED_S, lambda: self._bulk.send(arrive))
        elif not self.loses:
            self._bulk.send(arrive)

    def giving(self, name: str) -> Any:
        self.group.transfer_of(name).opened = True
        return SimpleNamespace(send=partial(self._give, name))

    def ask_driver(self, name: str, question: Any) -> Any:
        """Return the answer of a thread of the driver, when its process runs."""
        self.point("asks")
        transfer, wake, answers = self.group.transfer_of(name), Wake(self), list[Any]()

        def arrive() -> None:
            if self.alive and not transfer.closed:
                answers.append(transfer.answer(pickle.loads(pickle.dumps(question))))
                self._from_driver.send(wake)

        self._bulk.send(partial(self._by_driver, arrive))
        self._wait_in(transfer, wake)
        if not answers:
            raise ConnectionError("the transfer has ended")
        self.point("answered")
        return answers[0]

    def _give(self, name: str, state: Any = b"", *, report: dict[str, Any] | None = None) -> None:
        """Send a state to the driver, and wait until it has arrived. Like `take`, raise an error if the transfer ends first. A
        report comes from a thread that is not simulated, and needs no time."""
        transfer = self.group.transfer_of(name)
        if report is not None:
            transfer.data = bytes(state)
            transfer.report.set_result(report)
            return
        wake = Wake(self)
        transfer.giver, state = self, bytes(state)
        self._bulk.send(partial(self._by_driver, lambda: self.alive and (transfer.fill(state), wake())))
        self._wait_in(transfer, wake)
        transfer.check(state)

    def give_later(self, name: str, state: bytes) -> None:
        """Give a state to the driver, from a thread that no call waits for."""
        transfer = self.group.transfer_of(name)
        transfer.opened, transfer.giver = True, self
        self._bulk.send(partial(self._by_driver, lambda: self.alive and not transfer.closed and transfer.fill(state)))

    def take(self, name: str) -> Any:
        """Return a state when it has arrived at the driver, and from there here."""
        transfer = self.group.transfer_of(name)
        while transfer.data is None and not transfer.closed:
            self._wait_in(transfer, Wake(self))
        state, wake = transfer.data, Wake(self)
        self._by_driver(lambda: self._from_driver.send(wake))
        if not transfer.closed:
            self._wait_in(transfer, wake)
        transfer.check(state)
        return bytearray(state)

    def _by_driver(self, do: Callable[[], Any]) -> None:
        """Let the driver do its part of a transfer, when its process runs."""
        driver = self.group.driver
        if driver is None or driver.stopped_at is None:
            do()
        else:
            driver.at(0.0, do)

    def _wait_in(self, transfer: SimTransfer, wake: Wake) -> None:
        """Wait on the main task until something has moved, or the connection has ended."""
        transfer.ends.append(wake)
        self.client.driver.waited_on = SimpleNamespace(shutdown=lambda how: wake("shut down"))
        ended = wake.wait()
        self.client.driver.waited_on = None
        if ended:
            raise ConnectionError("the connection was shut down")

    def deliver(self, message: Message, group: SimGroup) -> None:
        self._from_driver.send(lambda: self.at(0.0, lambda: group is self.group and self.client.receive(message)))

    def ask(self, call: int, generation: int, verb: str, arguments: dict[str, Any], group: SimGroup) -> None:
        def arrive() -> None:
            if group is self.group and not self.client.driver.has_ended:
                self.client.driver.note_message(self.clock())
                self._calls.append((call, generation, verb, arguments))
                self.free()

        self._requests.send(lambda: self.at(0.0, arrive))


class SimTransfer(AnyTransfer):
    """One in virtual time."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.closed = name, False
        self.answer = lambda question: None
        self.giver: Worker | None = None
        self.ends: list[Wake] = []  # of the workers that wait

    def fill(self, data: Any) -> None:
        self.data = data
        self._wake()

    def check(self, state: Any) -> None:
        """Raise an error if the transfer has ended without this state."""
        if self.closed:
            raise ConnectionError("the transfer has ended")
        assert self.data == state, "the transfer has another state now"

    def close(self, why: str = "the transfer has ended") -> None:
        self.closed = True
        super().close(why)
        self._wake()

    def _wake(self) -> None:
        ends, self.ends = self.ends, []
        for wake in ends:
            wake()


class SimGroup:
    """The protocol of `raysgd.workers.worker_group.WorkerGroupProtocol`."""

    elastic = True
    worker_class = Worker

    def __init__(self, world: World, plan: Any, checker: Any, schedule: Any, before: SimGroup | None = None) -> None:
        """`before` is the group of the driver before this one, in the same cluster."""
        self.world, self.plan, self.checker, self.strike = world, plan, checker, schedule.strike
        self._schedule = schedule
        self.listener: Callable[[Event], None] = lambda event: None
        self.network = Network(world) if before is None else before.network
        self.nodes = [Node(f"node{n}", slots) for n, slots in enumerate(plan.nodes)] if before is None else before.nodes
        self.workers: dict[str, Worker] = {} if before is None else before.workers
        self.current: dict[Any, Worker] = {} if before is None else before.current  # the worker of each task
        self._names = itertools.count(1) if before is None else before._names
        self.keeper: Any = None if before is None else before.keeper
        self.driver: Any = None
        self.term, self.tenure = 0, None
        self.gone = False  # whether the driver's process has ended
        self.superseded, self.renewed_at = False, world.now
        self.launched: list[str] = []
        self.unreachable_s = plan.limits.unreachable_s
        self.last_call = 0
        self._events: list[Event] = []
        self._known: dict[str, None] = {}
        self._gone: set[str] = set()
        self._pending: list[str] = []
        self._transfers: dict[str, SimTransfer] = {}

    # -- one of several drivers -----------------------------------------------------------------------

    def wait(self, seconds: float, enough: Callable[[], bool]) -> None:
        """Let time pass for the driver."""
        if self.driver is None:
            self.world.run(seconds, enough)
        else:
            self.driver.wait(seconds, enough)

    def stopped_at(self) -> float | None:
        """Return since when the driver's process is stopped."""
        return None if self.driver is None else self.driver.stopped_at

    def connected(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.group is self and worker.alive]

    def driver_ended(self) -> None:
        """End all connections of the driver, whose process has ended, or which has let its workers go."""
        self.gone = True
        for worker in self.connected():
            blocked_s = self.network.wait_s(worker.node.name, DRIVER)
            worker.at(blocked_s + self.world.between(0.0, 0.005), partial(worker.driver_ended, self))
        for transfer in self._transfers.values():
            self.world.at(self.world.between(0.0, 0.005), transfer.close)

    def driver_stopped(self) -> None:
        for worker in self.connected():
            worker.driver_stopped()

    def enlists(self, worker: Worker) -> bool:
        """Return whether a process that starts finds its driver."""
        return not self.gone and (self.keeper is None or self.keeper.enlist(self.term, worker.name, self.world.now))

    def renew(self) -> None:
        """Raise an error if this driver's term is over."""
        sent = self.world.clock()
        if self.superseded or not self.driver.call(lambda: self.keeper.renew(self.term, None, self.world.now)):
            self._lose()
            raise SupersededError("another script has taken over the workers of this trainer")
        self.renewed_at = sent

    def renew_often(self) -> None:
        """Be the thread that renews the lease."""
        if self.gone or self.superseded or self.driver.over:
            return
        if self.driver.stopped_at is None:
            if self.keeper.renew(self.term, None, self.world.now):
                self.renewed_at = self.world.clock()
            else:
                self._lose()
        self.world.at(RENEW_EVERY_S, self.renew_often)

    def _lose(self) -> None:
        if not self.superseded:
            self.superseded = True
            self.driver_ended()

    def _check(self) -> None:
        for _ in range(RENEWALS):
            if self.superseded or (self.term and self.world.clock() - self.renewed_at > WITNESSED_S):
                self.renew()
        self.checker.acts(self)

    def adopt(self) -> list[str]:
        names = [name for name in self.keeper.workers if self.workers[name].alive]
        for worker in self.workers.values():
            if worker.name not in self.keeper.workers and worker.alive:
                self._reach(worker, 0.05, "its driver is not the driver any more")
        self._known.update(dict.fromkeys(names))
        for name in names:
            worker = self.workers[name]
            blocked_s = self.network.wait_s(worker.node.name, DRIVER)
            self.world.at(blocked_s + self.world.between(0.001, 0.05), partial(worker.ask_to_adopt, self))
        return names

    # -- workers --------------------------------------------------------------------------------------

    def launch(self, count: int) -> list[str]:
        self._check()
        names = [f"w{next(self._names)}" for _ in range(count)]
        self._known.update(dict.fromkeys(names))
        self.launched += names
        for name in names:
            self._pending.append(name)
            self.world.at(0.001, self._place)
        self.world.note("launch %s", names)
        return names

    def _place(self) -> None:
        """Start the processes for which there is room. The others wait until Ray tries again."""
        for name in list(self._pending):
            room = [node for node in self.nodes if node.free > 0]
            if not room:
                self.world.at(0.2, self._place)
                return
            self._pending.remove(name)
            node = max(room, key=lambda each: each.free)
            worker = self.workers[name] = self.worker_class(self, name, node)
            node.workers[worker] = None
            self.world.at(self.world.between(0.1, 0.6), worker.begin)

    def submit(self, worker: str, verb: str, arguments: dict[str, Any], *, generation: int = 0) -> int:
        self._check()
        call = self.last_call = self.last_call + 1
        self.world.note(
            "%s <- %s %s (call %d, generation %d)",
            worker,
            verb,
            arguments["call"].name if "call" in arguments else "",
            call,
            generation,
        )
        self._schedule.driver_sends("submit")
        if worker in self.workers:
            if verb in ("prepare", "warm"):
                self.checker.is_set_up(self.workers[worker])
            self.workers[worker].ask(call, generation, verb, arguments, self)
        return call

    def poll(self, timeout: float) -> list[Event]:
        self._schedule.driver_waits()
        self.wait(timeout, self._has_events)
        self.checker.raise_found()
        if self.superseded:
            self.renew()
        events, self._events = self._events, []
        return [event for event in events if self._is_news(event)]

    def _has_events(self) -> bool:
        return bool(self._events)

    def _is_news(self, event: Event) -> bool:
        if event.worker not in self._known:
            return False
        if isinstance(event, WorkerEnded):
            if event.worker in self._gone:
                return False
            self._gone.add(event.worker)
            self._end(event.worker)
        if isinstance(event, CallEnded) and isinstance(event.outcome, WorkerFailed) and event.worker not in self._gone:
            self.checker.gpu_failed(self.workers[event.worker], event.outcome)
        if not (isinstance(event, MessageReceived) and isinstance(event.message, ProgressReport)):
            self.world.note("driver: %s", _Shown(event))
        return True

    def emit(self, event: Event) -> None:
        self._events.append(event)

    def send(self, worker: str, message: Message) -> bool:
        if worker not in self.workers or worker in self._gone:
            return False
        self.world.note("%s <- %s", worker, message)
        self._schedule.driver_sends("send")
        self.workers[worker].deliver(message, self)
        return True

    def silent_for(self, worker: str) -> float:
        process = self.workers.get(worker)
        return 0.0 if process is None else self.world.clock() - self.world.shown_at(process.heard_at())

    def block(self, node: Node, other: str, seconds: float) -> None:
        """Block the links of a machine. If that lasts, the driver closes its connections to the machine's workers."""
        self.network.block(node.name, other, seconds)

        def give_up() -> None:
            left_s = self.network.wait_s(node.name, DRIVER)
            for worker in list(node.workers) if left_s else ():
                worker.lose_connection("its machine has not answered", "network", dies_in_s=left_s + 0.1)

        if seconds > self.unreachable_s:
            self.world.at(self.unreachable_s, give_up)

    def kill(self, worker: str) -> None:
        self._check()
        self.world.note("kill %s", worker)
        if worker in self.workers:
            process = self.workers[worker]
            self.checker.killed(process)
            process.given_up = True
            self._reach(process, 0.01, "killed by the driver")

    def dismiss(self, worker: str) -> None:
        self.world.note("dismiss %s", worker)
        self._known.pop(worker, None)
        if worker in self._pending:
            self._pending.remove(worker)
        self._end(worker)

    def _end(self, worker: str) -> None:
        self._check()
        process = self.workers.get(worker)
        if process is not None and process.alive:
            self.checker.dismissed(process)
            process.given_up = True
            self._reach(process, 0.05, "dismissed")

    def _reach(self, process: Worker, slowest_s: float, why: str) -> None:
        """End a process, as soon as the driver can reach its machine, if it lives until then."""
        blocked_s = self.network.wait_s(process.node.name, DRIVER)

        def end() -> None:
            if not (blocked_s and self.gone):
                process.die(why)

        self.world.at(blocked_s + self.world.between(0.0005, slowest_s), end)

    @contextlib.contextmanager
    def releasing(self) -> Iterator[None]:
        """Wait, on exit, until the workers that were dismissed meanwhile have left their nodes, for at most 2.5 s."""
        held = set(self._known)
        yield
        ended = [self.workers[name] for name in self.workers if name in held and name not in self._known]
        self._schedule.driver_waits()
        self.wait(2.5, lambda: not any(worker in worker.node.workers for worker in ended))

    def transfer(self) -> SimTransfer:
        name = f"transfer {len(self._transfers)}"
        self._transfers[name] = SimTransfer(name)
        return self._transfers[name]

    def giver_died(self, worker: Worker) -> None:
        """End the transfer of a state that a worker has not given completely."""
        for transfer in self._transfers.values():
            if transfer.giver is worker and transfer.data is None:
                self.world.at(self.world.between(0.0, 0.002), transfer.close)

    def transfer_of(self, name: str) -> SimTransfer:
        """Return the transfer with this name, for a worker that connects to it."""
        transfer = self._transfers.get(name)
        if transfer is None or transfer.closed:  # or of a driver before this one
            raise ConnectionError("the transfer has ended")
        return transfer

    def stop(self) -> None:
        if self.superseded or (self.tenure is not None and self.tenure.leaves):
            self.driver_ended()
            return
        for worker in list(self._known):
            self.dismiss(worker)

    # -- the cluster ----------------------------------------------------------------------------------

    def room(self) -> Room:
        free = max(sum(node.free for node in self.nodes) - len(self._pending), 0)
        capacity = sum(node.slots for node in self.nodes if node.alive)
        return Room(free, capacity, grows=True, needs={"CPU": (1, free)})

    def draining(self) -> dict[str, float | None]:
        return {node.name: node.removed_at - self.world.now for node in self.nodes if node.draining}

    def is_node_alive(self, node: str) -> bool:
        return any(each.name == node and each.alive for each in self.nodes)


class _Shown:
    """An event as a line of the trace. The line is formatted only if there is a trace."""

    def __init__(self, event: Event) -> None:
        self._event = event

    def __str__(self) -> str:
        event = self._event
        if isinstance(event, CallEnded):
            outcome: Outcome = event.outcome
            cause = getattr(outcome, "cause", "") or getattr(outcome, "error", "")
            return f"{event.worker} replied to call {event.call}: {type(outcome).__name__} {cause!s:.60}"
        if isinstance(event, MessageReceived):
            return f"{event.worker} sent {event.message}"
        return str(event)
