"""Run workers as Ray actors: launch them, call them, receive their events, end them. Driver."""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import re
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from raysgd.config import WorkerResources
from raysgd.core.channel.messages import KillProcess, Message, PerformCall, PreemptionNotice, StartDealer
from raysgd.core.channel.network import allow_connections
from raysgd.core.decisions.policy import OUT_OF_STEP, UNREACHABLE
from raysgd.core.outcomes import Failed
from raysgd.core.protocols import ProcessGroupBackend
from raysgd.environment import flag_from_environment
from raysgd.errors import NotActiveError
from raysgd.ray_data.dealer import Dealer
from raysgd.ray_data.reader import DEALER, RemoteDealer, RowReader
from raysgd.workers.actor import WorkerActor
from raysgd.workers.calls import open_answer, pickle_in_parts
from raysgd.workers.cluster import connecting, nodes
from raysgd.workers.cluster.foreign import draining_nodes, hide_deaths_of
from raysgd.workers.cluster.keeper import Tenure
from raysgd.workers.cluster.nodes import Room
from raysgd.workers.cluster.processes import LocalProcess, end_all
from raysgd.workers.cluster.ray_control_service import GcsQuery, ask, gcs_limit_s, require_ray
from raysgd.workers.control_client import CANNOT_CONNECT
from raysgd.workers.control_server import ControlServer
from raysgd.workers.events import CallEnded, Event, MessageReceived, WorkerEnded, WorkerStarted
from raysgd.workers.serialization import dumps
from raysgd.workers.transfer import Transfer
from raysgd.workers.worker_group import WorkerGroupProtocol

logger = logging.getLogger("raysgd")

RAY_MESSAGES = "RAYSGD_RAY_MESSAGES"
# Connections of the driver for each worker: control, bulk, the store's, and up to five of Ray's.
CONNECTIONS = 8
# What gloo writes when it ends a process because the ranks are in different collective calls.
MISMATCH = re.compile(r"gloo\S*\] (?P<what>op\.preamble[^\n]*collective mismatch[^\n]*)")
ANSWER_S = 1.0
# Ray ends a worker within milliseconds. If it does not, a worker ends itself after LEAVE_S in actor.py.
LEAVE_S = 8.0
DRAIN_LOOK_S = 2.0
UNANSWERED_S = 2.0
DEATH_SHOWN_S = 60.0


@dataclass
class _Handle:
    actor: Any
    node: str = ""
    pid: int = 0
    ended: bool = False
    serving: bool = False
    call: int = 0  # the newest
    transfers: list[Transfer] = field(default_factory=list)  # of its large arguments
    process: LocalProcess | None = None


class RayGroup(WorkerGroupProtocol):
    """Owns the actor handles, the control server and one queue of events. Decides nothing.

    Each worker is an actor with its own resources, because a placement group could not be resized.
    So growing never moves a survivor. The workers of a machine that does not answer for
    `unreachable_s` count as failed."""

    elastic = True

    def __init__(
        self,
        backend: ProcessGroupBackend,
        resources: WorkerResources,
        *,
        unreachable_s: float = 60.0,
        tenure: Tenure | None = None,
    ) -> None:
        import ray

        connecting.ensure_cluster(resources)
        self.listener: Callable[[Event], None] = lambda event: None
        self._backend, self._resources, self.tenure = backend, resources, tenure
        self.term = 0 if tenure is None else tenure.term
        self._handles: dict[str, _Handle] = {}
        self._calls = itertools.count(1)
        self._newest: tuple[Any, bytes] = (None, b"")  # arguments, and the form in which they are sent
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()  # reentrant, because a signal handler may use it
        self._arrived: deque[Event] = deque()
        self._ready: list[Event] = []
        self._here = ray.get_runtime_context().get_node_id()
        self._actor_class = ray.remote(WorkerActor)
        self._dealers: dict[str, Any] = {}
        self._datasets: dict[str, Any] = {}
        self._mark = uuid.uuid4().hex[:8]  # for unique names of actors
        self._session = require_ray()
        self._leaving: list[LocalProcess] = []
        self._draining: dict[str, float | None] = {}
        self._drain_query: GcsQuery[dict[str, float | None]] | None = None
        self._ask_at = 0.0
        self.control = ControlServer(
            self._events, nodes.driver_address(), node=self._here
        )  # last, as it starts a thread
        self.control.unreachable_s = unreachable_s
        if tenure is not None:
            tenure.on_renewed = self.control.greet
            tenure.on_superseded = partial(self.control.close, dismiss=False)

    # -- members --------------------------------------------------------------------------------------

    def launch(self, count: int) -> list[str]:
        """Ask Ray for `count` processes. Each one that starts is a `WorkerStarted` event.

        The actors of a trainer without a name have none, because Ray's client would wait for the
        GCS to register them."""
        require_ray(self._session)
        self._check()
        self.control.expected_workers = len(self._handles) + count
        allow_connections(self.control.expected_workers, each=CONNECTIONS)
        address, environment = self.control.address_for_workers(), connecting.forking_environment() or None
        workers = []
        for _ in range(count):
            worker = uuid.uuid4().hex[:8]
            actor: Any = self._actor_class.options(
                num_cpus=self._resources.cpus,
                num_gpus=self._resources.gpus,
                resources=dict(self._resources.custom) or None,
                scheduling_strategy=nodes.choose_placement(),
                max_restarts=0,
                max_task_retries=0,
                runtime_env=environment,
                **({} if self.tenure is None else self.tenure.options(worker)),
            ).remote(worker, address, self._backend, None if self.tenure is None else self.tenure.for_workers())
            self._handles[worker] = _Handle(actor)
            # This call fails if the process ends before it has connected, which nothing else would report.
            actor.__ray_ready__.remote().future().add_done_callback(partial(self._up, worker))
            workers.append(worker)
        return workers

    def _check(self) -> None:
        if self.tenure is not None:
            self.tenure.check()

    def adopt(self) -> list[str]:
        """Let the workers that another driver has left connect to this one, each when it has ended
        what it does."""
        actors = {} if self.tenure is None else self.tenure.find_left_workers()
        self.control.expected_workers = len(actors)
        for worker, actor in actors.items():
            self._handles[worker] = _Handle(actor)
            answer = actor.adopt.remote(self.control.address_for_workers(), self.term)
            answer.future().add_done_callback(partial(self._up, worker))
        return list(actors)

    def submit(self, worker: str, verb: str, arguments: dict[str, Any], *, generation: int = 0) -> int:
        """Start one call. It ends with a `CallEnded` event, which has the number returned here, or
        a `WorkerEnded` event."""
        require_ray(self._session)
        self._check()
        handle, call = self._handles[worker], next(self._calls)
        if not handle.serving:
            handle.serving = True
            self._serve(worker)
        handle.call = call
        packed, large = self._packed(verb, arguments)
        self._end_transfers(handle)
        for each in large:
            handle.transfers.append(transfer := self.transfer())
            transfer.fill(each)
        names = tuple(each.name for each in handle.transfers)
        self.control.send(worker, PerformCall(call, generation, packed, names))
        return call

    def _serve(self, worker: str) -> None:
        """Let the worker's main thread perform the calls that arrive on its control connection."""
        handle = self._handles.get(worker)
        if handle is not None and not handle.ended and self.control.is_connected(worker):
            handle.actor.serve.remote(self.term).future().add_done_callback(partial(self._served, worker))

    def _packed(self, verb: str, arguments: dict[str, Any]) -> tuple[bytes, list[memoryview]]:
        """Pickle the verb with its arguments, in parts. The engine passes the same dictionary for
        each rank, which is pickled once, unless a part is large, which would be kept."""
        of, newest = self._newest
        if of is not None and of[0] == verb and of[1] is arguments:
            return newest, []
        packed, large = pickle_in_parts((verb, arguments), dumps)
        self._newest = (None, b"") if large else ((verb, arguments), packed)
        return packed, large

    @staticmethod
    def _end_transfers(handle: _Handle) -> None:
        """End the transfers of a call that has ended, or whose outcome is not needed."""
        while handle.transfers:
            handle.transfers.pop().close()

    def _up(self, worker: str, done: Future[Any]) -> None:
        error = done.exception()
        if error is not None:
            cause = _first_line(error)
            self._events.put(WorkerEnded(worker, cause, UNREACHABLE if CANNOT_CONNECT in cause else "worker death"))

    def _served(self, worker: str, done: Future[None]) -> None:
        error, handle = done.exception(), self._handles.get(worker)
        if isinstance(error, _deaths()):
            self._events.put(WorkerEnded(worker, _first_line(error)))
            return
        if error is not None:  # the arguments cannot be unpickled there, or the outcome cannot be sent
            self._events.put(CallEnded(worker, 0 if handle is None else handle.call, Failed(error, str(error))))
        self._serve(worker)

    def poll(self, timeout: float) -> list[Event]:
        """Collect what has happened, and wait up to `timeout` for the first event. An error here
        (no room for a dealer, Ctrl-C) loses at most the event that it belongs to."""
        if self.tenure is not None and self.tenure.superseded:
            self._check()
        with contextlib.suppress(queue.Empty):
            self._arrived.append(self._events.get(timeout=timeout if not self._arrived else 0.0))
            while True:
                self._arrived.append(self._events.get_nowait())
        while self._arrived:
            event = open_answer(self._arrived.popleft())
            handle = self._handles.get(event.worker)  # once, because another thread may end the group now
            if handle is None:
                self.control.disconnect(event.worker)  # it started after it was dismissed
            elif self._note(event, handle):
                self._ready.append(self._explained(event, handle))
        ready, self._ready = self._ready, []
        return ready

    def _explained(self, event: Event, handle: _Handle) -> Event:
        """Add to the event a cause that this machine knows: gloo's message about data of an
        unexpected size, or how the system has ended the process."""
        if not isinstance(event, WorkerEnded) or event.reason != "worker death":
            return event
        text = nodes.stderr_tail(handle.pid) if handle.node == self._here else ""
        match = MISMATCH.search(text)
        if match is None:
            how = handle.process.how_it_ended() if handle.process is not None else ""
            hint = ", which the kernel sends for example when memory runs out" if how.endswith("SIGKILL") else ""
            return replace(event, cause=f"its process {how}{hint}") if how else event
        return WorkerEnded(event.worker, f"its process was ended by gloo ({match['what']})", OUT_OF_STEP)

    def _note(self, event: Event, handle: _Handle) -> bool:
        """Update what is known about the worker. Return whether to report the event."""
        import ray

        if isinstance(event, MessageReceived) and isinstance(event.message, StartDealer):
            self._start_dealer(event.message.name, bytes(event.body))
            return False
        if isinstance(event, MessageReceived) and isinstance(event.message, PreemptionNotice):
            return bool(ray.is_initialized())  # `ray.shutdown()` sends SIGTERM to the workers, too
        if isinstance(event, WorkerStarted):
            handle.node, handle.pid = event.node, event.pid
            handle.process = LocalProcess(event.pid) if event.node == self._here else None
            if not flag_from_environment(RAY_MESSAGES):
                hide_deaths_of(event.node, event.pid)
        if isinstance(event, CallEnded) and event.call == handle.call:
            self._end_transfers(handle)
        if isinstance(event, WorkerEnded):
            if handle.ended:
                return False
            handle.ended = True
            self._end(event.worker, handle)
        return True

    # -- data -----------------------------------------------------------------------------------------

    def rows(self, dataset: Any) -> RowReader:
        from ray import cloudpickle

        name = f"{DEALER}-{self._mark}-given-{id(dataset)}"
        self._datasets[name] = dataset  # while this reference exists, no other object has the same id
        self._start_dealer(name, cloudpickle.dumps(dataset) if name not in self._dealers else b"")
        return RowReader(RemoteDealer(name))

    def _start_dealer(self, name: str, packed: bytes) -> None:
        """Start the process that reads a dataset for all workers, unless it is running: one that
        the driver owns, on its node and without a CPU, because readers use CPUs."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if name not in self._dealers:
            used = [handle.node for handle in self._handles.values() if handle.node and not handle.ended]
            nodes.warn_no_room_for_data(used, self._resources.cpus, "a Ray Dataset")
            here = NodeAffinitySchedulingStrategy(self._here, soft=False)
            actor: Any = ray.remote(Dealer).options(name=name, num_cpus=0, scheduling_strategy=here)
            self._dealers[name] = ask(lambda: actor.remote(packed))

    # -- control --------------------------------------------------------------------------------------

    def send(self, worker: str, message: Message) -> bool:
        return self.control.send(worker, message)

    def transfer(self) -> Transfer:
        return Transfer(self.control)

    def silent_for(self, worker: str) -> float:
        return self.control.silent_for(worker)

    def kill(self, worker: str) -> None:
        """Send SIGKILL from this process or a worker on its node, as Ray's kill takes seconds."""
        handle = self._handles.get(worker)
        if handle is None:
            return
        self._check()
        if handle.process is not None:
            handle.process.kill()
        elif handle.pid:
            for name, other in list(self._handles.items()):
                if name != worker and other.node == handle.node and not other.ended:
                    self.send(name, KillProcess(handle.pid))
        self._end_actor(handle.actor)

    def _end(self, worker: str, handle: _Handle) -> None:
        """End a worker that is not needed, or has failed and must not come back."""
        self._check()
        self._end_transfers(handle)
        self.control.disconnect(worker)
        self._end_actor(handle.actor)

    def _end_actor(self, actor: Any) -> None:
        """Make Ray end an actor. Without Ray, a worker that was disconnected ends itself."""
        try:
            require_ray(self._session)
        except NotActiveError:
            return
        nodes.end_actor(actor)

    def dismiss(self, worker: str) -> None:
        handle = self._handles.get(worker)
        if handle is None:
            return
        self._end(worker, handle)
        self._leaving = [process for process in self._leaving if not process.ended]
        if handle.process is not None:
            self._leaving.append(handle.process)
        if handle.node and not flag_from_environment(RAY_MESSAGES):
            hide_deaths_of(handle.node, handle.pid, DEATH_SHOWN_S)
        self._handles.pop(worker, None)  # last, so that Ctrl-C cannot leave a worker without a handle

    @contextlib.contextmanager
    def releasing(self) -> Iterator[None]:
        """Wait, on exit, until Ray shows that the resources of workers that were dismissed
        meanwhile are free, because the next line of the user's script may need them."""
        running = {worker: h for worker, h in self._handles.items() if h.node and not h.ended}
        actors = {worker: h.actor for worker, h in running.items() if h.node not in self._draining}
        room = nodes.get_within(ANSWER_S, self.room) if actors and self._resources.as_dict() else None
        yield
        ended = [actor for worker, actor in actors.items() if worker not in self._handles]
        if room is not None and ended:
            nodes.wait_for_room(self._resources, room.free + len(ended), ended)

    def stop(self) -> None:
        if self.tenure is not None and (self.tenure.leaves or self.tenure.superseded):
            self._handles = {}
            self.control.close(dismiss=False)
            self.tenure.stop()
            return
        with self.releasing():
            for worker in list(self._handles):
                self.dismiss(worker)
        self.control.close()
        for dealer in self._dealers.values():
            self._end_actor(dealer)
        self._dealers = {}
        leaving, self._leaving = self._leaving, []
        for process in end_all(leaving, patience_s=LEAVE_S):
            logger.warning("worker process %d did not end within %g s: killed it", process.pid, LEAVE_S)
        if self.tenure is not None:
            self.tenure.stop()

    # -- the cluster ----------------------------------------------------------------------------------

    def room(self) -> Room:
        self.draining()  # raises an error at once if Ray is known not to answer
        return nodes.room_for(self._resources)

    def draining(self) -> dict[str, float | None]:
        """What Ray's last answer means now. ClusterError: none for too long."""
        require_ray(self._session)
        if self._drain_query is None:
            if time.monotonic() >= self._ask_at:
                self._drain_query = GcsQuery(draining_nodes)
        elif self._drain_query.answered or self._drain_query.age_s > gcs_limit_s():
            self._draining = self._drain_query.result(gcs_limit_s())
            self._drain_query, self._ask_at = None, time.monotonic() + DRAIN_LOOK_S
        return {node: None if at is None else max(at - time.time(), 0.0) for node, at in self._draining.items()}

    def is_node_alive(self, node: str) -> bool:
        if self._drain_query is not None and not self._drain_query.answered and self._drain_query.age_s > UNANSWERED_S:
            return True
        return nodes.is_node_alive(node)


def _deaths() -> tuple[type[Exception], ...]:
    from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, WorkerCrashedError

    return RayActorError, NodeDiedError, ObjectLostError, WorkerCrashedError


def _first_line(error: BaseException) -> str:
    error = getattr(error, "cause", error)  # of Ray's error about one in a worker
    lines = str(error).strip().splitlines() or [""]
    if getattr(error, "actor_init_failed", False):  # Ray keeps only the text, which ends with the error
        return lines[-1]
    return f"{type(error).__name__}: {lines[0]}"
