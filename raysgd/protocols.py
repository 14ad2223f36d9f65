"""The shapes that the engine works with: who calls their methods, and where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from raysgd.progress import Control, Progress
from raysgd.rendezvous import Seat

__all__ = ["Backend", "Replica", "ReplicaFactory"]


class Backend(Protocol):
    """How the ranks of a generation meet. The object on the driver plans; its pickled copies join and leave.

    in_place: can a process leave one generation and join the next? (TensorFlow's cannot.)
    needs_offers: does `plan` need something from every worker? Then each is asked for its `offer` first.
    """

    in_place: bool
    needs_offers: bool

    def offer(self) -> dict[str, Any]:
        """Worker, main thread, before `plan`: return what the driver needs from this worker, such as an address with a port
        that it holds, or the GPUs that it has. `join` follows, or another `offer`."""

    def plan(self, seats: Sequence[Seat], offers: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        """Driver: open a new meeting point and return what each rank needs to get there. The old one is closed. `offers`
        are in the order of seats, empty unless `needs_offers`. Without seats, only close the old one."""

    def join(self, seat: Seat, settings: dict[str, Any]) -> None:
        """Worker, main thread: meet the others. Raises when they do not come within the limit."""

    def leave(self) -> None:
        """Worker, main thread: out of the generation. Never raises, and never waits for a peer."""

    def abort(self) -> None:
        """Worker, listener thread: make a collective that waits fail now."""

    def collectives(self) -> int:
        """Worker: how many collective calls this rank has begun in this generation; -1 where nobody counts them."""

    def is_interruption(self, error: BaseException) -> bool:
        """Worker: does this error say that a peer or the network went away?"""


class Replica(Protocol):
    """One operator with its data, counters and state, living in one worker. No Ray inside."""

    progress: Progress

    def run(self, method: str, **arguments: Any) -> Any:
        """Worker, main thread: one call. What it returns must be picklable."""

    def seated(self, seat: Seat) -> None:
        """Worker: a new generation stands; wrap and deal anew."""

    def partial(self) -> Any:
        """Worker: what the running call has so far, when it is cut short."""

    def state(self) -> bytes:
        """Worker: everything another process needs to go on from here."""

    def load(self, data: bytes) -> None:
        """Worker: become what `state` of another replica says."""

    def close(self) -> None:
        """Worker: let go of files, threads and loaders."""


ReplicaFactory = Callable[[Seat, Control], Replica]
