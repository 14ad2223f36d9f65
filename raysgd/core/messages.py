"""Define every message between the driver and its workers. Both.

A message is a frozen dataclass. On a connection it is a JSON object with the name of its class as `type` and its
fields; some are followed by a body of raw bytes. `connection` describes how they are framed.

Every connection starts with the token, then with one of `Hello`, `OpenBulk` and `OpenTransfer`, which the driver
answers with `Admitted` or `Rejected`:

    Hello            the control connection of a worker, for as long as it lives
    OpenBulk         carries what is large or must not be lost: snapshots, reports of training functions
    OpenTransfer     carries one state or one checkpoint
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from raysgd.core.outcomes import CollectivePlace
from raysgd.core.progress import Progress

__all__ = [
    "Admitted",
    "Alive",
    "AllowReports",
    "BoundaryAnswer",
    "Bye",
    "CallAnswer",
    "ConfirmBoundary",
    "FunctionReport",
    "GiveState",
    "Hello",
    "Interrupt",
    "KillProcess",
    "Message",
    "MessageError",
    "OpenBulk",
    "OpenTransfer",
    "PerformCall",
    "PreemptionNotice",
    "ProgressReport",
    "ProposeBoundary",
    "Received",
    "Rejected",
    "SnapshotUpload",
    "StackReport",
    "StackRequest",
    "StartDealer",
    "State",
    "TakeState",
    "decode",
    "encode",
]


class MessageError(ValueError):
    """What was received is not a message of this module."""


@dataclass(frozen=True)
class Message:
    """The base class of all messages."""


# -- the first message of a connection, and its answer ------------------------------------------------


@dataclass(frozen=True)
class Hello(Message):
    """A worker sends this when its process has started. The group reports it to the engine as `WorkerStarted`, and the
    end of the connection as `WorkerEnded`."""

    worker: str
    node: str
    pid: int


@dataclass(frozen=True)
class OpenBulk(Message):
    """A worker sends this before its first snapshot or report. The connection stays open: `SnapshotUpload`,
    `FunctionReport` and `StartDealer` follow, and the driver answers each with `Received`."""

    worker: str


@dataclass(frozen=True)
class OpenTransfer(Message):
    """A worker sends this to give or take the state with this secret name. `GiveState` or `TakeState` follows."""

    name: str


@dataclass(frozen=True)
class Admitted(Message):
    """The driver accepted a connection's first message."""


@dataclass(frozen=True)
class Rejected(Message):
    """The driver refuses this connection and closes it, because the transfer that it names has ended. The worker does not
    try again."""

    reason: str


# -- the control connection, from the worker ----------------------------------------------------------


@dataclass(frozen=True)
class Alive(Message):
    """A worker sends this every second, from a thread beside the training thread. A process that is stopped does
    not."""


@dataclass(frozen=True)
class ProgressReport(Message):
    """The training thread sends this after a batch, a few times a second at most. `call` is the call that made the
    progress, `partial` its metrics so far. The driver uses it for progress bars, for boundaries, and when the worker
    fails."""

    call: int
    progress: Progress
    partial: dict[str, Any] | None = None


@dataclass(frozen=True)
class PreemptionNotice(Message):
    """A worker sends this when it has received SIGTERM, because its machine will be stopped. The engine moves its work
    to other workers at the next batch boundary."""


@dataclass(frozen=True)
class BoundaryAnswer(Message):
    """A worker answers `ProposeBoundary` with this. `accepted` is True if it will stop there. `begun` is the step that
    it has begun, -1 if it has not begun that call. If all ranks accept, `ConfirmBoundary` follows, otherwise another
    proposal."""

    round: int
    accepted: bool
    begun: int


@dataclass(frozen=True)
class StackReport(Message):
    """A worker answers `StackRequest` with this: the training thread's stack (innermost frame first), phase and
    batch, and what is known of its collective calls."""

    round: int
    frames: tuple[str, ...]
    phase: str = ""
    batch: int = 0
    place: CollectivePlace = field(default_factory=CollectivePlace)


@dataclass(frozen=True)
class CallAnswer(Message):
    """A worker sends this when a call has ended. Body: the pickled outcome, sealed (`workers/calls.py`). Ray sends an
    outcome that is large."""


# -- the control connection, from the driver ----------------------------------------------------------


@dataclass(frozen=True)
class PerformCall(Message):
    """The driver asks a worker to perform a call. Body: the pickled call, sealed (`workers/calls.py`). `CallAnswer`
    follows. Without a body, the worker's main thread performs one call that the driver has submitted to Ray."""


@dataclass(frozen=True)
class Interrupt(Message):
    """The driver sends this when a rank of the generation failed. Its peers leave their collective call and end the
    running call. Workers of a later generation ignore it."""

    generation: int


@dataclass(frozen=True)
class ProposeBoundary(Message):
    """The driver asks every rank to stop after `step` of this call, for a planned change. `BoundaryAnswer` follows."""

    round: int
    call: int
    step: int


@dataclass(frozen=True)
class ConfirmBoundary(Message):
    """The driver sends this when all ranks accepted the boundary. Ranks that wait there end their call."""


@dataclass(frozen=True)
class StackRequest(Message):
    """The driver's watchdog asks where a worker is. `StackReport` follows, unless the process is stopped."""

    round: int


@dataclass(frozen=True)
class AllowReports(Message):
    """The driver sends this to each rank when the user has fetched a round of a training function's reports. In this
    run, a rank waits in `train.report` after its report number `reports`, until the driver allows more."""

    run: int
    reports: int


@dataclass(frozen=True)
class KillProcess(Message):
    """The driver asks a worker to kill a process on the same machine: a worker that hangs."""

    pid: int


@dataclass(frozen=True)
class Bye(Message):
    """The driver does not need this worker any more. The worker ends itself if Ray does not end it."""


# -- bulk connections ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class SnapshotUpload(Message):
    """Rank 0 sends this when a snapshot is due. Body: the full state, or nothing if the ranks keep
    it themselves. `call` and `partial` are those of
    `ProgressReport`. The driver keeps the newest snapshot, in case all workers fail."""

    progress: Progress
    call: int
    partial: dict[str, Any] | None = None


@dataclass(frozen=True)
class FunctionReport(Message):
    """A rank sends this in `train.report` ("report") and `train.save_checkpoint` ("checkpoint"). Body: the pickled
    metrics, `metrics_size` bytes, then the checkpoint, if there is one. The driver drops those of earlier attempts."""

    kind: Literal["report", "checkpoint"]
    run: int
    attempt: int
    rank: int
    metrics_size: int
    has_checkpoint: bool


@dataclass(frozen=True)
class StartDealer(Message):
    """Each rank sends this when it registers a Ray Dataset. Body: the pickled dataset. The driver starts one actor of
    this name, from which all ranks read."""

    name: str


@dataclass(frozen=True)
class Received(Message):
    """The driver has received a message on a bulk connection, with its body."""


# -- transfers of a state -----------------------------------------------------------------------------


@dataclass(frozen=True)
class GiveState(Message):
    """The worker sends its state. Body: the state. `report` is JSON: of a save, what the worker has written, or its error.
    `Received` follows."""

    worker: str
    report: str = "null"


@dataclass(frozen=True)
class TakeState(Message):
    """The worker asks for the state that another worker, or the driver, gives. `State` follows."""

    worker: str


@dataclass(frozen=True)
class State(Message):
    """The driver passes the state on, while it arrives. Body: the state."""


TYPES: dict[str, Callable[..., Message]] = {each.__name__: each for each in Message.__subclasses__()}


def encode(message: Message) -> bytes:
    """Return the message as JSON.

    >>> encode(Interrupt(3))
    b'{"type": "Interrupt", "generation": 3}'
    """
    return json.dumps({"type": type(message).__name__, **vars(message)}, default=_plain).encode()


def _plain(value: Any) -> Any:
    """Return a NumPy number as a Python number, because counts and metrics can be NumPy numbers, and a dataclass as a
    dictionary."""
    if is_dataclass(value):
        return vars(value)
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be part of a control message")


def decode(data: bytes | bytearray) -> Message:
    """Return the message. Raise MessageError for an unknown type, and for fields that are missing, unknown or of
    another type than the class says."""
    try:
        content = json.loads(data)
        if not isinstance(content, dict):
            raise MessageError("it is not a JSON object")
        kind = TYPES.get(str(content.pop("type", None)))
        if kind is None:
            raise MessageError("its type is unknown")
        message: Message = _built(kind, content)
    except (ValueError, RecursionError) as error:
        why = str(error) if isinstance(error, MessageError) else f"{type(error).__name__}: {error}"
        raise MessageError(f"not a raysgd control message: {why}") from None
    return message


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _built(kind: Any, given: dict[str, Any]) -> Any:
    """Return an object of this dataclass with exactly these fields."""
    hints = _hints(kind)
    if given.keys() != hints.keys():
        raise MessageError(f"the fields of {kind.__name__} are {', '.join(hints) or 'none'}")
    return kind(**{name: _checked(given[name], hint, f"{kind.__name__}.{name}") for name, hint in hints.items()})


def _checked(value: Any, hint: Any, where: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):  # only "or None" is used
        return None if value is None else _checked(value, arguments[0], where)
    if origin is Literal and value in arguments:
        return value
    if is_dataclass(hint) and isinstance(value, dict):
        return _built(hint, value)
    if origin is tuple and isinstance(value, list):
        hints = arguments[:1] * len(value) if arguments[-1] is ... else arguments
        if len(hints) == len(value):
            return tuple(_checked(each, hint, where) for each, hint in zip(value, hints, strict=True))
    if origin is dict and isinstance(value, dict):
        return value
    if isinstance(hint, type) and type(value) is hint:
        return value
    raise MessageError(f"{where} must be {getattr(hint, '__name__', hint)}")
