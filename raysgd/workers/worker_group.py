"""Define what the engine needs from a group of workers, in Ray or in this process. Driver."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from raysgd.core.channel.messages import Message
from raysgd.workers.cluster.nodes import Room
from raysgd.workers.events import Event
from raysgd.workers.transfer import AnyTransfer


class WorkerGroupProtocol(Protocol):
    """Starts workers, sends them calls and messages, and returns what happened as events. Decides
    nothing.

    The engine calls all methods, on the thread of the trainer's call. `poll`, and what starts a
    call, or starts or ends a process, raises `SupersededError` if another driver has taken over the
    workers. `elastic` is False for a group whose worker cannot fail and which cannot grow: some of
    these methods are written for that one. `listener` receives events that happen inside `submit`,
    before `poll` could return them. `term` is the number of this driver of a trainer with a name,
    or 0."""

    elastic: bool = False
    term: int = 0
    listener: Callable[[Event], None]

    def launch(self, count: int) -> list[str]:
        """Start workers, and return their names at once. `WorkerStarted` follows for each."""

    def adopt(self) -> list[str]:
        """Let the workers that a driver of this trainer has left connect to this one. Return their
        names. `WorkerStarted` or `WorkerEnded` follows for each."""
        return []

    def submit(self, worker: str, verb: str, arguments: dict[str, Any], *, generation: int = 0) -> int:
        """Start a call and return its number, which its `CallEnded` event also has."""

    def poll(self, timeout: float) -> list[Event]:
        """Collect what has happened, after at most `timeout`. A failure is reported only once."""

    def send(self, worker: str, message: Message) -> bool:
        """Send a message beside the running call. Return False if the worker has gone."""

    def silent_for(self, worker: str) -> float:
        """For how many seconds the worker has sent nothing, 0 before it has started."""
        return 0.0

    def kill(self, worker: str) -> None:
        """End a worker that may not respond. Its failure follows as an event."""

    def dismiss(self, worker: str) -> None:
        """End a worker that is not needed, and free its resources. No event follows."""

    def transfer(self) -> AnyTransfer:
        """Make a new transfer of a state."""

    def room(self) -> Room:
        """For how many workers the cluster has room now."""

    def draining(self) -> dict[str, float | None]:
        """The nodes that will be removed, and in how many seconds (None: unknown). Raise
        `ClusterError` if Ray has not answered for too long."""
        return {}

    def is_node_alive(self, node: str) -> bool:
        """Whether the node belongs to the cluster, as far as is known."""
        return True

    def releasing(self) -> AbstractContextManager[None]:
        """Wait, on exit, until the resources of workers that were dismissed meanwhile are free."""
        return nullcontext()

    def stop(self) -> None:
        """End all workers that are not left to another driver. Return when those of this machine
        have ended."""
