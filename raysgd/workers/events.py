"""Define the events that a group of workers reports to the engine, in order. Driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from raysgd.core.channel.messages import Message
from raysgd.core.outcomes import Outcome


@dataclass(frozen=True)
class WorkerStarted:
    """A launched worker's process has started, and its control client is connected from `address`.
    `local` says whether it is on the driver's node. `gpus` are those of `Hello`."""

    worker: str
    node: str
    pid: int
    address: str = ""
    local: bool = False
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class CallEnded:
    """A call ended. `call` is the number that `submit` returned."""

    worker: str
    call: int
    outcome: Outcome


@dataclass(frozen=True)
class WorkerEnded:
    """A worker's process ended, or cannot be reached. It has failed, unless it was dismissed."""

    worker: str
    cause: str
    reason: str = "worker death"


@dataclass(frozen=True)
class MessageReceived:
    """A worker sent a message: progress, an answer, a snapshot or a report. `body` holds its data,
    that of an answer in its parts. The control server makes a `Moved` itself about once a second
    while a large message arrives. The sender of a `FunctionReport` waits until somebody calls
    `acknowledge`; any thread may."""

    worker: str
    message: Message
    body: Any = b""
    acknowledge: Callable[[], None] = field(default=lambda: None, compare=False)


Event = WorkerStarted | CallEnded | WorkerEnded | MessageReceived
