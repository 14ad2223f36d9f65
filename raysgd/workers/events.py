"""What a group tells the engine: values, in the order in which they happened."""

from __future__ import annotations

from dataclasses import dataclass

from raysgd.core.connection import Body
from raysgd.core.messages import Message
from raysgd.outcomes import Outcome

__all__ = ["CallEnded", "Event", "MessageReceived", "WorkerEnded", "WorkerStarted"]


@dataclass(frozen=True)
class WorkerStarted:
    """A launched worker's process is up and connected."""

    worker: str
    node: str
    pid: int


@dataclass(frozen=True)
class CallEnded:
    """A call came back. `call` is the number that `submit` gave it."""

    worker: str
    call: int
    outcome: Outcome


@dataclass(frozen=True)
class WorkerEnded:
    """A worker is dead, or cannot be reached any more."""

    worker: str
    cause: str
    reason: str = "worker death"


@dataclass(frozen=True)
class MessageReceived:
    """A worker sent a message: progress, an answer, a snapshot, a report. `body` is what came with it."""

    worker: str
    message: Message
    body: bytes | Body = b""


Event = WorkerStarted | CallEnded | WorkerEnded | MessageReceived
