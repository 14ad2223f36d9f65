"""Move a state from the worker that gives it to the driver, and through it to the workers that take
it. Both.

The driver passes each part on as soon as it has arrived, so that a state crosses the network once,
and not twice, before its takers have it. What moves is reported, so that a slow network does not
count as a hang. A checkpoint of a worker that does not see the script's files takes the same way,
and so do what a worker reports of a save in the background, what it asks in the middle of a call,
and the large arguments of calls."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any

from raysgd.core.connection import PIECE, Body, Connection, ControlAddress, Waiting, connect, make_room
from raysgd.core.messages import Answer, Ask, GiveState, Open, Received, State, TakeState

if TYPE_CHECKING:
    from raysgd.workers.control_server import ControlServer

STALL_S = 600.0  # for the other end to send or take anything: a machine may be suspended for a while
LOOK_S = 1.0


class Transfer:
    """One state on its way through the driver. Owns its memory there, and its connections, which
    `close` ends with a ConnectionError in workers that wait. `moved` grows with each part. `given`
    gets the giving worker's report, or a ConnectionError. `answer` is called, in threads of the
    connections, with what workers ask."""

    answer: Callable[[Any], Any]

    def __init__(self, server: ControlServer) -> None:
        self._server = server
        self._changed = threading.Condition()
        self._data: Any = None
        self._size, self._filled = -1, 0
        self.moved = 0
        self.opened = self._closed = False
        self._connections: set[Connection] = set()
        self.given: Future[dict[str, Any] | None] = Future()
        self.name = server.expect_transfer(self._serve)

    def fill(self, data: Any) -> None:
        with self._changed:
            self._data = memoryview(data).cast("B")
            self._size = self._filled = len(self._data)
            self._changed.notify_all()

    @property
    def data(self) -> Any:
        assert 0 <= self._size == self._filled
        return self._data

    def close(self, why: str = "the transfer has ended") -> None:
        self._server.end_transfer(self.name)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for connection in self._connections:
                with contextlib.suppress(OSError):  # it has ended
                    connection.socket.shutdown(socket.SHUT_RDWR)
        self._lost(why)

    def _serve(self, connection: Connection, worker: str) -> None:
        note = self._server.make_note(worker)
        with self._changed:
            if self._closed:
                return
            self._connections.add(connection)
            self.opened = True
        try:
            message, size = connection.receive()
            if isinstance(message, GiveState):
                self._receive(connection, size, note)
                with contextlib.suppress(InvalidStateError):  # it was closed at this moment
                    self.given.set_result(message.report)
            elif isinstance(message, Ask):
                connection.send(Answer(self.answer(message.question)))
            else:
                self._send(connection, note)
        except OSError as error:
            self._lost(str(error))
            raise
        finally:
            with self._changed:
                self._connections.discard(connection)

    def _lost(self, why: str) -> None:
        with contextlib.suppress(InvalidStateError):  # it was given
            self.given.set_exception(ConnectionError(why))

    def _receive(self, connection: Connection, size: int, note: Callable[[], None]) -> None:
        """Receive the state. If that fails, those that take it get no more either."""

        def moved(complete: int) -> None:
            self.moved += 1
            self._fill(body, complete)
            note()

        with self._changed:
            if self._size >= 0:
                raise ValueError("a second worker gives this state")
            self._size = size
        try:
            body = make_room(size)
            self._fill(body, 0)
            connection.receive_body(size, moved, room=body)
            connection.send(Received())
        except BaseException as error:
            self.close(str(error))
            raise

    def _fill(self, body: Body, complete: int) -> None:
        with self._changed:
            self._data, self._filled = body, complete
            self._changed.notify_all()

    def _send(self, connection: Connection, note: Callable[[], None]) -> None:
        connection.socket.settimeout(STALL_S)
        self._wait_beyond(-1, note)
        connection.stream(State(), self._arriving(note), self._size, note)

    def _arriving(self, note: Callable[[], None]) -> Iterator[memoryview]:
        """Yield the parts of the state when they are complete."""
        sent = 0
        while sent < self._size:
            end = min(self._wait_beyond(sent, note), sent + PIECE)
            with memoryview(self._data) as view:
                yield view[sent:end]
            sent = end

    def _wait_beyond(self, sent: int, note: Callable[[], None]) -> int:
        """Wait until more of the state is here than `sent`, and return how much. Meanwhile, the
        worker that takes it does not hang: it waits for the one that gives it."""
        with self._changed:
            while not self._closed and (self._data is None or self._filled <= sent < self._size):
                self._changed.wait(LOOK_S)
                note()
            if self._closed:
                raise ConnectionError("the transfer has ended")
            return self._filled


class InlineTransfer:
    """A transfer of the worker in the driver's own process."""

    answer: Callable[[Any], Any]

    def __init__(self, name: str) -> None:
        self.name, self.moved, self.data, self.opened = name, 0, b"", False
        self.given: Future[dict[str, Any] | None] = Future()

    def fill(self, data: Any) -> None:
        self.data, self.moved = data, len(data)

    def send(self, *data: Any, report: dict[str, Any] | None = None) -> None:
        self.fill(b"".join(data))
        with contextlib.suppress(InvalidStateError):  # it was closed
            self.given.set_result(report)

    def close(self) -> None:
        with contextlib.suppress(InvalidStateError):  # it was given
            self.given.set_exception(ConnectionError("the transfer has ended"))


class Giving:
    """Owns the connection of a worker that gives something, whose early end the driver sees."""

    def __init__(
        self, address: ControlAddress, worker: str, name: str, *, waiting: Waiting = contextlib.nullcontext
    ) -> None:
        self._waiting = waiting
        self._connection = connect(address, Open(worker, name), waiting=waiting)

    def send(self, *data: Any, report: dict[str, Any] | None = None) -> None:
        """Send a state or a file, and what is to be said of it. Return when the driver has all of
        it."""
        with self._connection as connection, self._waiting(connection.socket):
            connection.socket.settimeout(STALL_S)
            connection.send(GiveState(report), *data)
            connection.expect(Received)


def ask(
    address: ControlAddress, worker: str, name: str, question: Any, *, waiting: Waiting = contextlib.nullcontext
) -> Any:
    """Ask the driver."""
    with connect(address, Open(worker, name), waiting=waiting) as connection, waiting(connection.socket):
        connection.socket.settimeout(STALL_S)
        connection.send(Ask(question))
        return connection.expect(Answer).answer


def take(address: ControlAddress, worker: str, name: str, *, waiting: Waiting = contextlib.nullcontext) -> Body:
    """Take a state that is given to the driver."""
    with connect(address, Open(worker, name), waiting=waiting) as connection, waiting(connection.socket):
        connection.socket.settimeout(STALL_S)
        connection.send(TakeState())
        _, size = connection.receive()
        room = bytearray(size)  # not a file, because a replica can keep parts of it
        return connection.receive_body(size, room=room)
