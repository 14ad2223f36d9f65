"""Define the outcomes of one call on one rank: a value or an error, and the progress. Both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from raysgd.core.measures.progress import Progress

DATA_LOADER, BATCH, GPU = "data loader", "batch", "gpu failure"


@dataclass(frozen=True)
class CollectiveCalls:
    """How many collective calls a rank that was interrupted had made in this generation.

    waits_in  the number of the call that it was in; -1: in none, or the backend does not count them
    begun     (step, number of calls made before it), for the newest steps
    """

    waits_in: int = -1
    begun: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Ok:
    """The call succeeded. `collectives` is how many collective calls it made (-1: not counted)."""

    value: Any = None
    progress: Progress = field(default_factory=Progress)
    collectives: int = -1


@dataclass(frozen=True)
class Failed:
    """The rank's own code raised an error. `error` has the user's type if that can be pickled."""

    error: BaseException
    traceback: str = ""
    progress: Progress = field(default_factory=Progress)


@dataclass(frozen=True)
class Interrupted:
    """The rank is alive but had to stop, because a peer failed or the driver asked it to. `value`
    is its partial result. `reason` is set if this rank itself is the cause."""

    value: Any = None
    cause: str = ""
    progress: Progress = field(default_factory=Progress)
    asked: bool = False
    reason: str = ""
    collectives: CollectiveCalls = field(default_factory=CollectiveCalls)


@dataclass(frozen=True)
class GpuFault:
    """An error of a GPU that every further use of it raises again in this process.

    uuid       of the GPU, "" if it is unknown
    by_kernel  whether a kernel may have caused it, which would fail on every GPU
    """

    uuid: str = ""
    by_kernel: bool = False


@dataclass(frozen=True)
class WorkerFailed:
    """The process ended, or its node failed. `value` is the partial result in its last progress
    message. `hung_at` is the phase, and the batch of the call, in which code hung on it while its
    peers waited; None if its process was stopped, or did not hang.

    A worker whose GPU is broken returns this itself, with the `fault`, and ends its process.
    """

    cause: str
    reason: str = "worker death"
    value: Any = None
    progress: Progress = field(default_factory=Progress)
    hung_at: tuple[str, int] | None = None
    fault: GpuFault | None = None


class DataLoaderFailure(BaseException):
    """A process of a data loader ended unexpectedly. The rank is alive, and continues with a new
    loader.

    This is not an Exception, so that user code that catches the errors of its batches does not
    catch it.
    """

    def interrupted(self, where: str, value: Any, progress: Progress) -> Interrupted:
        """The outcome of a call that this ended; `where` names the loader."""
        return Interrupted(value, f"{where}: {self}", progress, reason=DATA_LOADER)


class RetryStep(BaseException):
    """All ranks must train the batch again. The text says why.

    This is not an Exception, so that user code that catches the errors of its batches does not
    catch it.
    """

    def interrupted(self, value: Any, progress: Progress) -> Interrupted:
        return Interrupted(value, f"a batch is trained again, because {self}", progress, reason=BATCH)


Outcome = Ok | Failed | Interrupted | WorkerFailed
