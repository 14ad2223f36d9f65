"""Connect to the driver, and send and receive messages and bodies over a socket in blocking mode.
Both.

`frames` describes what is sent."""

from __future__ import annotations

import errno
import itertools
import logging
import mmap
import os
import pickle
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import IO, TypeVar

from raysgd.core.channel import frames
from raysgd.core.channel.messages import Message

logger = logging.getLogger(__name__)

PIECE = 4 << 20
PART = 256 << 10  # of a body that is written to a file
JOINED = 1 << 16
LARGE = 64 << 20
Body = bytearray | mmap.mmap | memoryview
MessageT = TypeVar("MessageT", bound=Message)
Waiting = Callable[[socket.socket], AbstractContextManager[object]]  # entered while a thread waits for the other end

CONNECT_S = 30.0
SEND_S = 60.0  # for the driver to take or answer a small message: it may be suspended for a while
# The driver drops connections that are not admitted yet when it is flooded with them.
PAUSES_S = (0.1, 0.3, 1.0, 3.0)
PATIENCE_S = 5.0
UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT}


@dataclass(frozen=True)
class ControlAddress:
    """Where the driver listens, the key, and how long its machine may not answer."""

    host: str
    port: int
    key: bytes = field(repr=False)
    unreachable_s: float = 60.0


class Connection:
    """One end of a proven connection. One thread at a time may send, and one receive."""

    def __init__(self, opened: socket.socket) -> None:
        self.socket = opened

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    # -- sending --------------------------------------------------------------------------------------

    def send(self, message: Message, *body: bytes | bytearray | memoryview) -> None:
        """Send a message, whose body are these buffers, one after another. Return when the kernel
        has all of it.

        The socket's timeout limits a standstill, and not the whole transfer."""
        views = [memoryview(each).cast("B") for each in body if len(each)]
        size = sum(map(len, views))
        if size > JOINED:
            self.stream(message, views, size)
        else:
            self._send_all(memoryview(b"".join((frames.framed(message, size), *views))))  # in one packet

    def stream(
        self, message: Message, body: Iterable[memoryview], size: int, moved: Callable[[], None] = lambda: None
    ) -> None:
        """Send a message with a body of this size. Call `moved` whenever some was taken."""
        self._send_all(memoryview(frames.framed(message, size)))
        for part in body:
            self._send_all(part, moved)

    def _send_all(self, data: memoryview, moved: Callable[[], None] = lambda: None) -> None:
        """Send all of it. (The timeout of `sendall` is for everything together.)"""
        while data:
            data = data[self.socket.send(data) :]
            moved()

    # -- receiving ------------------------------------------------------------------------------------

    def receive(self) -> tuple[Message, int]:
        """Receive the next message, and the size of its body, which follows."""
        size, body = frames.SIZES.unpack(_exactly(self.socket, frames.SIZES.size))
        message: Message = pickle.loads(_exactly(self.socket, size))
        return message, body

    def expect(self, kind: type[MessageT]) -> MessageT:
        """Receive the next message, which must be of this type and have no body."""
        message, body = self.receive()
        if not isinstance(message, kind) or body:
            raise ValueError(f"received {type(message).__name__} instead of {kind.__name__}")
        return message

    def receive_body(
        self, size: int, moved: Callable[[int], None] = lambda complete: None, *, room: Body | None = None
    ) -> Body:
        """Read a message's body directly to where it stays. Call `moved` whenever a part has
        arrived, with how much of the beginning is there."""
        with _file_for(size) if room is None else nullcontext() as file:
            if file is not None:
                return self._receive_file(file, size, moved)
        body = bytearray(size) if room is None else room
        view, filled = memoryview(body), 0
        while filled < size:
            filled += _receive_some(self.socket, view[filled:])
            moved(filled)
        return body

    def _receive_file(self, file: IO[bytes], size: int, moved: Callable[[int], None]) -> mmap.mmap:
        """Write a body to a file, which takes a third of the time of new memory."""
        room, filled = memoryview(bytearray(PART)), 0
        while filled < size:
            count = _receive_some(self.socket, room[: size - filled])
            file.write(room[:count])
            filled += count
            moved(filled)
        file.flush()
        return mmap.mmap(file.fileno(), size)


def connect(
    address: ControlAddress,
    first: Message,
    *,
    patience_s: float = PATIENCE_S,
    answer_s: float = SEND_S,
    waiting: Waiting = nullcontext,
) -> Connection:
    """Open a connection, prove the key and send the first message. Return when the driver has
    admitted it, which may take it `answer_s`.

    If it ends before that, others are tried for `patience_s` from then on."""
    until = 0.0
    for pause_s in itertools.chain(PAUSES_S, itertools.repeat(PAUSES_S[-1])):
        opened = socket.create_connection((address.host, address.port), timeout=CONNECT_S)
        try:
            opened.settimeout(answer_s)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            detect_unreachable(opened, address.unreachable_s)
            with waiting(opened):
                connection = _greet(opened, address.key, first)
            opened.settimeout(SEND_S)
            return connection
        except ConnectionError as error:
            opened.close()
            until = until or time.monotonic() + patience_s
            logger.debug("the driver at %s:%d closed a new connection: %s", address.host, address.port, error)
        except BaseException:
            opened.close()
            raise
        if time.monotonic() + pause_s > until:
            break
        time.sleep(pause_s)
    raise ConnectionAbortedError(
        f"the driver at {address.host}:{address.port} closed every new connection for {patience_s:g} s: it is flooded with "
        "connections, or another process has that port now"
    )


def _greet(opened: socket.socket, key: bytes, first: Message) -> Connection:
    frames.check_greeting(bytes(_exactly(opened, len(frames.GREETING))))
    mine = frames.new_number()
    numbers = bytes(_exactly(opened, frames.NUMBER_BYTES)) + mine
    opened.sendall(mine + frames.proof(key, frames.WORKER, numbers) + frames.framed(first))
    if not frames.proves(_exactly(opened, frames.PROOF_BYTES), key, frames.DRIVER, numbers):
        raise ConnectionError("the other end does not have this trainer's key")
    return Connection(opened)


def _exactly(opened: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    room = memoryview(data)
    while room:
        room = room[_receive_some(opened, room) :]
    return data


def _receive_some(opened: socket.socket, room: memoryview) -> int:
    """Fill a part of the buffer, and return its size. An unreachable machine is a TimeoutError."""
    try:
        count = opened.recv_into(room[:PIECE])
    except OSError as error:
        raise as_timeout(error) from None
    if count == 0:
        raise ConnectionError("the connection ended early")
    return count


def detect_unreachable(connection: socket.socket, limit_s: float) -> None:
    """Enable TCP keepalive: reading raises TimeoutError when the other machine has not responded
    for `limit_s`. Its kernel responds also for a process that is stopped or busy."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    limit_s = max(limit_s, 1.0)
    every = max(int(limit_s / 5), 1)
    settings = {
        "TCP_KEEPIDLE": every,
        "TCP_KEEPINTVL": every,
        "TCP_KEEPCNT": max(int(limit_s / every) - 1, 1),
        "TCP_USER_TIMEOUT": int(limit_s * 1000),
    }
    for name, value in settings.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def as_timeout(error: OSError) -> OSError:
    """Convert errors that mean an unreachable machine to a TimeoutError, and leave others as they
    are. (If a machine in the same network is switched off, the error is "no route to host".)"""
    return TimeoutError(str(error)) if error.errno in UNREACHABLE else error


@contextmanager
def _file_for(size: int) -> Iterator[IO[bytes] | None]:
    """A temporary file without a name for a large body (a full state), so that a driver on a small
    machine does not need the memory for it. None for a small one, and if the disk is full."""
    with ExitStack() as opened:
        file = None
        if size >= LARGE and hasattr(os, "posix_fallocate"):
            try:
                file = opened.enter_context(tempfile.TemporaryFile(prefix="raysgd-"))
                os.posix_fallocate(file.fileno(), 0, size)  # now, because a full disk could not be reported later
            except OSError as error:
                logger.info("keeping %d bytes in memory, because no temporary file can hold them: %s", size, error)
                file = None
        yield file
