"""Define every message between the driver and its workers. Both.

A message is a frozen dataclass, which is pickled. Some are followed by a body, and only these can
be large. `frames` describes how they are sent. Objects of the user are bytes in a message or in a
body, so that they are unpickled in the thread that needs them, and not in the one that receives
them.

The first message of a connection is `Hello` or `Open`. The driver answers it with its proof:

    Hello    the control connection of a worker, for as long as it lives
    Open     a connection for what is large or must not be lost: snapshots and reports of training functions, or one state
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from raysgd.core.measures.metrics import Measured
from raysgd.core.measures.progress import Progress


@dataclass(frozen=True)
class Message:
    """The base class of all messages."""


# -- the first message of a connection ----------------------------------------------------------------


@dataclass(frozen=True)
class Hello(Message):
    """A worker sends this when its process has started. The group reports it to the engine as
    `WorkerStarted`, and the end of the connection as `WorkerEnded`. `gpus` are the numbers of those
    that Ray has given to it, on its node."""

    worker: str
    node: str
    pid: int
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Open(Message):
    """A worker sends this to open another connection.

    Without a `transfer`, it is the bulk connection, which stays open: `SnapshotUpload`,
    `FunctionReport`, `StartDealer` and large `CallAnswer` follow, and the driver answers each with
    `Received`. It is opened before the first of them.

    With the name of one, it gives or takes one state, takes an argument, or asks something:
    `GiveState`, `TakeState` or `Ask` follows. The driver closes it if that transfer has ended."""

    worker: str
    transfer: str = ""


# -- the control connection, from the worker ----------------------------------------------------------


@dataclass(frozen=True)
class Alive(Message):
    """A worker sends this every second from a thread, unless its process is stopped."""


@dataclass(frozen=True)
class ProgressReport(Message):
    """The training thread sends this after a batch, a few times a second at most. `call` is the
    call that made the progress, `partial` what it has measured so far. The driver uses it for
    progress bars, for boundaries, and when the worker fails."""

    call: int
    progress: Progress
    partial: Measured | None = None


@dataclass(frozen=True)
class Moved(Message):
    """A worker sends this now and then while it gives or takes a state: a slow network is no
    hang."""


@dataclass(frozen=True)
class PreemptionNotice(Message):
    """A worker sends this when it has received SIGTERM, because its machine will be stopped. The
    engine moves its work to other workers at the next batch boundary."""


@dataclass(frozen=True)
class BoundaryAnswer(Message):
    """A worker answers `ProposeBoundary` with this. `accepted` is True if it will stop there.
    `begun` is the step that it has begun, -1 if it has not begun that call. If all ranks accept,
    `ConfirmBoundary` follows, otherwise another proposal."""

    round: int
    accepted: bool
    begun: int


@dataclass(frozen=True)
class StackReport(Message):
    """A worker answers `StackRequest` with this: the training thread's stack (innermost frame
    first), phase and batch."""

    round: int
    frames: tuple[str, ...]
    phase: str = ""
    batch: int = 0


@dataclass(frozen=True)
class CallAnswer(Message):
    """A worker sends this when a call has ended: the pickled outcome. What is large of it
    (`workers.calls`) is the body, in parts of these `sizes`: then it is sent over the bulk
    connection."""

    call: int
    outcome: bytes
    sizes: tuple[int, ...] = ()


# -- the control connection, from the driver ----------------------------------------------------------


@dataclass(frozen=True)
class PerformCall(Message):
    """The driver asks for a call: the pickled verb and arguments. The worker takes what is large of
    them (`workers.calls`) from these transfers. `CallAnswer` follows."""

    call: int
    generation: int
    packed: bytes
    transfers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Interrupt(Message):
    """The driver sends this when a rank of the generation failed. Its peers leave their collective
    call and end the running call. Workers of a later generation ignore it."""

    generation: int


@dataclass(frozen=True)
class ProposeBoundary(Message):
    """The driver asks every rank to stop after this `step`. `BoundaryAnswer` follows."""

    round: int
    call: int
    step: int


@dataclass(frozen=True)
class ConfirmBoundary(Message):
    """The driver sends this when all ranks have accepted: those that wait there end their call."""


@dataclass(frozen=True)
class StackRequest(Message):
    """The watchdog asks where a worker is. `StackReport` follows, unless it is stopped."""

    round: int


@dataclass(frozen=True)
class KillProcess(Message):
    """The driver asks a worker to kill a process on the same machine: a worker that hangs."""

    pid: int


@dataclass(frozen=True)
class Bye(Message):
    """The driver does not need this worker any more. It ends itself if Ray does not end it."""


# -- bulk connections ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class SnapshotUpload(Message):
    """Rank 0 sends this when a snapshot is due. Body: the full state, or nothing if the ranks keep
    it themselves. `call` and `partial` are those of `ProgressReport`. The driver keeps the newest
    snapshot, in case all workers fail."""

    progress: Progress
    call: int
    partial: Measured | None = None


@dataclass(frozen=True)
class FunctionReport(Message):
    """A rank sends this in `train.report` ("report") and `train.save_checkpoint` ("checkpoint").
    Body: the pickled metrics, `metrics_size` bytes, then the checkpoint, if there is one. The
    driver drops those of earlier attempts. The rank continues when it is answered: when all ranks
    have sent theirs, and what they contain is stored. `outside` is whether a later attempt than the
    first has made it before `train.elastic`."""

    kind: Literal["report", "checkpoint"]
    run: int
    attempt: int
    rank: int
    metrics_size: int
    has_checkpoint: bool
    outside: bool = False


@dataclass(frozen=True)
class StartDealer(Message):
    """Each rank sends this when it registers a Ray Dataset. Body: the pickled dataset. The driver
    starts one actor of this name, from which all ranks read."""

    name: str


@dataclass(frozen=True)
class Received(Message):
    """The driver has received a message on a bulk connection, with its body."""


# -- transfers of a state -----------------------------------------------------------------------------


@dataclass(frozen=True)
class GiveState(Message):
    """The worker sends its state. Body: the state, or the content of a save. `report` is what the
    worker of a save has written, or its error. `Received` follows."""

    report: dict[str, Any] | None = None


@dataclass(frozen=True)
class TakeState(Message):
    """The worker asks for a state, which is the body of the `Answer` that follows."""


@dataclass(frozen=True)
class Ask(Message):
    """A rank asks the driver something about the running call. `Answer` follows."""

    question: Any


@dataclass(frozen=True)
class Answer(Message):
    """The driver's answer, or the state that it sends."""

    answer: Any = None
