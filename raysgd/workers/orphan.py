"""Free the main thread of a worker whose driver has ended, or does not answer. Keep what the worker
has for another driver, and end it if none comes. Worker."""

from __future__ import annotations

import contextlib
import gc
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from raysgd.core.channel import messages
from raysgd.core.decisions.lease import LEASE_S
from raysgd.core.outcomes import Outcome
from raysgd.core.protocols import ReplicaFactory
from raysgd.core.ranks import RankInfo
from raysgd.workers.replica_host import ReplicaHost

# How long an orphan stays in its process group, because its peers need it for the step that it has completed.
LINGER_S = 2.0


class DriverContact:
    """One driver, as its worker knows it. Owns when the worker has last heard of it, the calls that
    it asks the main thread to make, and the connection on which that thread waits for it.

    A worker whose driver is lost is an orphan since then. It must `stop` at the next batch
    boundary, `leave` the process group, so that ranks that wait for it stop too, and `end` after
    `orphan_s`. It ends at once if that is 0, and the driver says nothing of itself, or if the
    connection has ended and the worker has no state of the training.
    """

    waited_on: socket.socket | None = None

    def __init__(
        self,
        orphan_s: float,
        now: float,
        *,
        stop: Callable[[], None],
        leave: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        self._orphan_s, self.heard_at = orphan_s, now
        self._stop, self._leave, self._end = stop, leave, end
        self.since: float | None = None  # when the worker has become an orphan
        self._lingers = False
        self.has_ended = False  # the connection
        self.is_over = False  # the worker has another driver, or is about to end
        self.calls: queue.SimpleQueue[messages.PerformCall | None] = queue.SimpleQueue()  # None: wait for no more
        self._main = threading.main_thread().ident

    def note_message(self, now: float) -> None:
        """Note a message of the driver."""
        self.heard_at, self.since = now, None

    def note_end(self) -> None:
        """Note that the connection has ended."""
        self.has_ended = True
        self.calls.put(None)  # also if it has ended the wait when the driver did not answer

    def look(self, now: float, *, holds_state: bool) -> None:
        """Do what is due."""
        silent = self._orphan_s > 0 and now - self.heard_at >= LEASE_S
        if self.is_over or not (self.has_ended or silent):
            return
        if self.has_ended and not (holds_state and self._orphan_s):
            self._give_up()
        elif self.since is None:
            self.since, self._lingers = now, True
            self._stop()
            if (connection := self.waited_on) is not None:
                with contextlib.suppress(OSError):  # it has ended
                    connection.shutdown(socket.SHUT_RDWR)
            self.calls.put(None)
        elif now - self.since >= self._orphan_s:
            self._give_up()
        elif self._lingers and now - self.since >= LINGER_S:
            self._lingers = False
            self._leave()

    def _give_up(self) -> None:
        self.is_over = True
        self._end()

    @contextlib.contextmanager
    def waiting(self, connection: socket.socket) -> Iterator[None]:
        """A context in which a connection of the main thread ends when the driver does not answer,
        as that thread is what another driver needs. A save in the background, on a thread of its
        own, may still get an answer."""
        if threading.get_ident() != self._main:
            yield
            return
        self.waited_on = connection  # first, because `look` sets `since` first
        try:
            if self.since is not None:
                raise TimeoutError("the driver has ended, or does not answer")
            yield
        finally:
            self.waited_on = None


@dataclass(frozen=True)
class Left:
    """What a worker has for the next driver, when its own has ended.

    rank_info  in the newest generation that it has joined
    call       the number of the newest call that trained
    parts      how each part of that call has ended here, after the number of its generation
    """

    rank_info: RankInfo
    call: int
    parts: list[tuple[int, Outcome]]


class NamedHost(ReplicaHost):
    """Owns what is `Left`, and the training's state while no replica has it."""

    _training_state: Any = None
    _legacy = Left(RankInfo(), -1, [])

    def perform(self, verb: str, arguments: dict[str, Any]) -> Outcome:
        call = (arguments or self._arguments)["call"] if verb == "run" else None
        outcome = super().perform(verb, arguments)
        if call is not None and call.name == "train":
            number, legacy = call.arguments["call"], self._legacy
            before = legacy.parts if number == legacy.call else []
            self._legacy = replace(legacy, call=number, parts=[*before, (legacy.rank_info.generation, outcome)])
        return outcome

    @property
    def holds_state(self) -> bool:
        return self._training_state is not None or super().holds_state

    def _joined(self, rank_info: RankInfo) -> None:
        if not rank_info.solo:
            self._legacy = replace(self._legacy, rank_info=rank_info)
        super()._joined(rank_info)

    def _attach(self, factory: ReplicaFactory) -> Left | None:
        """Leave the group of a driver that has ended. Return what the next one continues with, if
        this worker has the training's state: then a replica of the next one's code gets it. If that
        raises an error, the state is kept for another driver."""
        self._backend.leave()
        if self.holds_state and self._backend.in_place:
            if self._replica is not None:
                self._training_state = self._replica.state()
                self._replica.close()
                self._replica = None
                gc.collect()  # the new one needs the memory of its model
            self._warm(None, factory, RankInfo(solo=True), {})
            assert self._replica is not None
            replica, self._replica = self._replica, None
            getattr(replica, "take_over", replica.load)(self._training_state)
            self._replica, self._training_state, self._lacks_state = replica, None, False
        return self._legacy if self.holds_state else None
