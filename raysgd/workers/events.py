"""What a group tells the engine: values, in the order in which they happened."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from raysgd.outcomes import Outcome
from raysgd.workers.landing import Landing

__all__ = ["Arrived", "Event", "Gone", "Heard", "Replied"]


@dataclass(frozen=True)
class Arrived:
    """A launched worker's process is up and its line stands."""

    worker: str
    node: str
    pid: int


@dataclass(frozen=True)
class Replied:
    """A call came back. `call` is the number that `submit` gave it."""

    worker: str
    call: int
    outcome: Outcome


@dataclass(frozen=True)
class Gone:
    """A worker is dead, or cannot be reached any more."""

    worker: str
    cause: str
    reason: str = "worker death"


@dataclass(frozen=True)
class Heard:
    """A message on a worker's line: progress, an answer, or a notice."""

    worker: str
    message: dict[str, Any] = field(default_factory=dict)
    body: bytes | Landing = b""


Event = Arrived | Replied | Gone | Heard
