"""What one rank answers to one call: a value, with how far the rank has got."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from raysgd.progress import Progress

__all__ = [
    "DATA_LOADER",
    "CollectivePlace",
    "DataLoaderFailure",
    "Failed",
    "Interrupted",
    "Ok",
    "Outcome",
    "WorkerFailed",
]

DATA_LOADER = "data loader"


@dataclass(frozen=True)
class CollectivePlace:
    """Where a rank was when its call was cut short.

    count    how many collective calls it had begun in this generation; -1 where the backend does not count
    name     the one that it was in, such as "barrier"; empty when it was in none
    line     the user's line that called it: "file:line function"
    begun    (step, number of collective calls that were made before it), for the newest steps
    """

    count: int = -1
    name: str = ""
    line: str = ""
    begun: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Ok:
    """The call ended as it should, after so many collective calls (-1: not counted)."""

    value: Any = None
    progress: Progress = field(default_factory=Progress)
    collectives: int = -1


@dataclass(frozen=True)
class Failed:
    """The rank's own code raised. `error` keeps the user's type where it can be pickled."""

    error: BaseException
    traceback: str = ""
    progress: Progress = field(default_factory=Progress)


@dataclass(frozen=True)
class Interrupted:
    """The rank is fine but had to stop: a peer left, or it was asked to. `value` is what it had so far; `reason` is set
    when the cause lies in this rank itself."""

    value: Any = None
    cause: str = ""
    progress: Progress = field(default_factory=Progress)
    asked: bool = False
    reason: str = ""
    place: CollectivePlace = field(default_factory=CollectivePlace)


@dataclass(frozen=True)
class WorkerFailed:
    """The process or its node is gone. `value` is what its last progress message said."""

    cause: str
    reason: str = "worker death"
    value: Any = None
    progress: Progress = field(default_factory=Progress)


class DataLoaderFailure(BaseException):
    """Raised on a worker when a process of a data loader died: the rank is fine, and goes on with a new loader.

    Not an Exception, so that a loop that handles errors of its batches lets it pass.
    """

    def interrupted(self, where: str, value: Any, progress: Progress) -> Interrupted:
        """Return the outcome of a call that ended by it; `where` names the loader."""
        return Interrupted(value, f"{where}: {self}", progress, reason=DATA_LOADER)


Outcome = Ok | Failed | Interrupted | WorkerFailed
