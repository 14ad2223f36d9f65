"""Move a state from a worker to the driver, or from there to workers. Both.

What moves is reported, so that a slow network does not count as a hang. A checkpoint of a worker
that does not see the script's files takes the same way, and so do what a worker reports of a save
in the background, what it asks in the middle of a call, and the large arguments of calls."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING, Any

from raysgd.core.channel.connection import Body, Connection, ControlAddress, Waiting, connect
from raysgd.core.channel.messages import Answer, Ask, GiveState, Open, Received, TakeState

if TYPE_CHECKING:
    from raysgd.workers.control_server import ControlServer

STALL_S = 600.0  # for the other end to send or take anything: a machine may be suspended for a while


class AnyTransfer:
    """A state or a checkpoint on its way: a worker gives it to the driver (the verb "state"), or
    workers take it from there ("load").

    opened  whether a worker has begun to give or take it
    moved   how much has arrived
    data    the state, once the worker that gives it has ended its call
    given   what the giving worker reports; a ConnectionError if the transfer ends first
    answer  returns the answer to what a worker asks, in any thread
    """

    name: str
    answer: Callable[[Any], Any]

    def __init__(self) -> None:
        self.opened, self.moved = False, 0
        self.data: Any = None
        self.report: Future[dict[str, Any] | None] = Future()

    def fill(self, data: Any) -> None:
        """Give a state that the driver has."""
        self.data = data

    def close(self, why: str = "the transfer has ended") -> None:
        """End the transfer, and interrupt workers that wait in it."""
        with contextlib.suppress(InvalidStateError):  # it was given
            self.report.set_exception(ConnectionError(why))


class Transfer(AnyTransfer):
    """One whose worker is another process. Owns its memory on the driver, and its connections,
    which `close` ends with a ConnectionError in workers that wait. `moved` grows with each part
    that arrives. `answer` is called in threads of the connections."""

    def __init__(self, server: ControlServer) -> None:
        super().__init__()
        self._server, self._lock = server, threading.Lock()
        self._closed = self._gets = False
        self._connections: set[Connection] = set()
        self.name = server.expect_transfer(self._serve)

    def fill(self, data: Any) -> None:
        self.data = memoryview(data).cast("B")

    def close(self, why: str = "the transfer has ended") -> None:
        self._server.end_transfer(self.name)
        with self._lock:
            self._closed = True
            for connection in self._connections:
                with contextlib.suppress(OSError):  # it has ended
                    connection.socket.shutdown(socket.SHUT_RDWR)
        super().close(why)

    def _serve(self, connection: Connection, worker: str) -> None:
        note = self._server.make_note(worker)
        with self._lock:
            if self._closed:
                return
            self._connections.add(connection)
            self.opened = True
        try:
            message, size = connection.receive()
            if isinstance(message, GiveState):
                self._receive(connection, size, note)
                with contextlib.suppress(InvalidStateError):  # it was closed at this moment
                    self.report.set_result(message.report)
            elif isinstance(message, Ask):
                connection.send(Answer(self.answer(message.question)))
            else:
                connection.socket.settimeout(STALL_S)
                connection.stream(Answer(), [self.data], len(self.data), note)
        except OSError as error:
            super().close(str(error))
            raise
        finally:
            with self._lock:
                self._connections.discard(connection)

    def _receive(self, connection: Connection, size: int, note: Callable[[], None]) -> None:
        """Receive the state."""

        def moved(complete: int) -> None:
            self.moved += 1
            note()

        with self._lock:
            if self._gets:
                raise ValueError("a second worker gives this state")
            self._gets = True
        self.data = connection.receive_body(size, moved)
        connection.send(Received())


class InlineTransfer(AnyTransfer):
    """One whose worker is the driver's own process."""

    def send(self, *data: Any, report: dict[str, Any] | None = None) -> None:
        self.data = b"".join(data)
        self.moved = len(self.data)
        with contextlib.suppress(InvalidStateError):  # it was closed
            self.report.set_result(report)


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
