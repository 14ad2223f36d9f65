"""Define what the engine works with: a backend that connects ranks, and a replica. Both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from raysgd.core.control import Control
from raysgd.core.measures.progress import Progress
from raysgd.core.ranks import RankInfo


class ProcessGroupBackend:
    """Connects the ranks of a generation. The object on the driver plans; its pickled copies join
    and leave. What a backend inherits from here does nothing.

    in_place      whether a process that leaves one generation joins the next; otherwise, all are
                  new
    shares        whether the ranks of a generation can give each other their states; otherwise,
                  states go through the driver
    needs_offers  whether `plan` needs something from each worker, which is then asked for its
                  `offer` first
    """

    in_place: bool = True
    shares: bool = False
    needs_offers: bool = False

    def offer(self) -> dict[str, Any]:
        """Worker, main thread, before `plan`: return what the driver needs from this worker, such
        as an address with a port that it holds, or its GPUs."""
        return {}

    def plan(self, rank_infos: Sequence[RankInfo], offers: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        """Driver: close the old rendezvous, and open a new one if there are ranks. Return what each
        needs to find it. `offers` are by rank, if the backend `needs_offers`."""
        return [{} for _ in rank_infos]

    def join(self, rank_info: RankInfo, settings: dict[str, Any]) -> None:
        """Worker, main thread: join the process group. Raise an error if that takes too long."""

    def leave(self) -> None:
        """Worker, main thread: leave the process group. Never raises, never waits for a peer."""

    def abort(self) -> None:
        """Worker, control thread: make a collective that is waiting fail now."""

    def ensure_whole(self, *, unless_seen: bool = False) -> None:
        """Worker, main thread: return when all that this rank has received in collective calls is
        whole. Raise an error if a peer's failure may have cut it off. With `unless_seen`, the last
        such look counts if no collective call was made since."""

    def collectives(self) -> int:
        """Worker: return how many collective calls this generation had here; -1: not counted."""
        return 0

    def is_interruption(self, error: BaseException) -> bool:
        """Worker: return whether this error means that a peer or the network failed."""
        return False


class SingleWorkerBackend(ProcessGroupBackend):
    """The backend of a group that never has more than one worker: it has no process group."""


@dataclass(frozen=True)
class Call:
    """What a trainer asks of each replica: a method of the replica's class, or a function that
    takes the replica first, and the other arguments. The trainer makes it, and `Replica.run`
    unpacks it; the method is pickled by reference. `change` is the number of the change of the
    state that it makes for the user, 0 if it makes none: a replica whose state has this change, or
    a later one, does not make it again."""

    method: Callable[..., Any]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    change: int = 0

    @property
    def name(self) -> str:
        """The method's name, for the phase of progress and for messages."""
        return self.method.__name__


class Replica(Protocol):
    """One operator with its data, counters and state, in one worker. Knows nothing of Ray."""

    progress: Progress

    def run(self, call: Call) -> Any:
        """Worker, main thread: make one call. What it returns must be picklable."""

    def joined(self, rank_info: RankInfo) -> None:
        """Worker: a new generation is up; wrap the model and divide the data again."""

    def partial(self) -> Any:
        """Worker: return what the running call has measured so far, when it is interrupted."""

    def state(self) -> bytes:
        """Worker: return everything that another process needs to continue from here."""

    def load(self, data: bytes) -> None:
        """Worker: take the state of another replica."""

    def share_state(self, giver: int, *, takes: bool, is_new: bool) -> None:
        """Worker: let the rank `giver` of the generation that was just joined send its state, by
        collective calls that all ranks make, and take it if this one `takes` it: all or nothing.
        One that `is_new` may have none instead: then its progress is undefined."""

    def close(self) -> None:
        """Worker: release files, threads and loaders."""


ReplicaFactory = Callable[[RankInfo, Control], Replica]
