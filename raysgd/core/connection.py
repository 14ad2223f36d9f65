"""Connect to the driver, and send and receive complete messages over a socket in blocking mode. Both.

A connection starts with the driver's token, as TOKEN_BYTES raw bytes; the driver reads and parses nothing before that
is verified. Then messages follow: the length of a header and of a body, the header (a message of `messages` as JSON),
and the body, raw bytes that may be empty. Nothing is pickled or unpickled here."""

from __future__ import annotations

import errno
import itertools
import logging
import mmap
import os
import socket
import struct
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from raysgd.core.messages import Admitted, Message, Rejected, decode, encode

__all__ = [
    "PIECE",
    "PREFIX",
    "TOKEN_BYTES",
    "Body",
    "ControlAddress",
    "RejectedError",
    "as_timeout",
    "connect",
    "detect_unreachable",
    "framed",
    "make_room",
    "receive",
    "receive_body",
    "receive_into",
    "receive_message",
    "receive_some",
    "send",
    "send_now",
    "sizes",
]

logger = logging.getLogger(__name__)

TOKEN_BYTES = 32
PREFIX = struct.Struct(">IQ")
LARGEST_HEADER = 1 << 20
PIECE = 4 << 20
JOINED = 1 << 16
LARGE = 64 << 20
Body = bytearray | mmap.mmap
MessageT = TypeVar("MessageT", bound=Message)

CONNECT_S = 30.0
SEND_S = 60.0  # for the driver to take or answer a small message: it may be suspended for a while
# The driver drops connections that are not admitted yet when it is flooded with them.
PAUSES_S = (0.1, 0.3, 1.0, 3.0)
PATIENCE_S = 5.0
UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT}


@dataclass(frozen=True)
class ControlAddress:
    """Where the driver listens, the token that lets a worker in, and how long the driver's machine may not answer before
    its connections end."""

    host: str
    port: int
    token: str = field(repr=False)
    unreachable_s: float = 60.0


class RejectedError(ConnectionError):
    """Raised when the driver knows this client but refuses the connection, because the transfer that it names has ended."""


def connect(address: ControlAddress, first: Message, *, patience_s: float = PATIENCE_S) -> socket.socket:
    """Open a connection, show the token and send the first message. Return the socket when the driver has admitted it.

    A connection that ends before that is tried again for `patience_s`."""
    greeting = address.token.encode() + framed(first)
    until = time.monotonic() + patience_s
    for pause_s in itertools.chain(PAUSES_S, itertools.repeat(PAUSES_S[-1])):
        connection = socket.create_connection((address.host, address.port), timeout=CONNECT_S)
        try:
            connection.settimeout(SEND_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            detect_unreachable(connection, address.unreachable_s)
            connection.sendall(greeting)
            answer, _ = receive_message(connection)
            if isinstance(answer, Admitted):
                return connection
            if isinstance(answer, Rejected):
                raise RejectedError(answer.reason)
        except (ConnectionError, ValueError) as error:
            if isinstance(error, RejectedError):
                connection.close()
                raise
            logger.debug("the driver at %s:%d closed a new connection: %s", address.host, address.port, error)
        except BaseException:
            connection.close()
            raise
        connection.close()
        if time.monotonic() + pause_s > until:
            break
        time.sleep(pause_s)
    raise ConnectionAbortedError(
        f"the driver at {address.host}:{address.port} closed every new connection for {patience_s:g} s: it is flooded with "
        "connections, or another process has that port now"
    )


def framed(message: Message, size: int = 0) -> bytes:
    """Return what is sent before the body, which has `size` bytes."""
    header = encode(message)
    if len(header) > LARGEST_HEADER:
        raise ValueError(f"a control message of {len(header)} bytes is too long: at most {LARGEST_HEADER} are allowed")
    return PREFIX.pack(len(header), size) + header


def send(connection: socket.socket, message: Message, *body: bytes | bytearray | memoryview) -> None:
    """Send a message, whose body are these buffers, one after another. Return when the kernel has it.

    The socket's timeout limits a standstill, and not the whole transfer."""
    views = [memoryview(each).cast("B") for each in body if len(each)]
    small = bytearray(framed(message, sum(map(len, views))))  # and what follows, if that is small: one packet
    for view in views:
        if len(small) + len(view) <= JOINED:
            small += view
            continue
        _send_all(connection, memoryview(bytes(small)))
        small.clear()
        _send_all(connection, view)
    if small:
        _send_all(connection, memoryview(small))


def _send_all(connection: socket.socket, data: memoryview) -> None:
    """Send all of it. (The timeout of `sendall` is for everything together.)"""
    while data:
        data = data[connection.send(data) :]


def send_now(connection: socket.socket, frame: bytes) -> None:
    """Send a framed message on a non-blocking socket. Raise BlockingIOError when the kernel has no room for all of it: the
    other end has not read for a long time, and the connection cannot be used any more."""
    if connection.send(frame) < len(frame):
        raise BlockingIOError("only a part of the message could be sent")


def sizes(prefix: bytes | bytearray) -> tuple[int, int]:
    """Return the sizes of a header and a body. Raise ValueError if the header is too large."""
    header, body = PREFIX.unpack(prefix)
    if header > LARGEST_HEADER:
        raise ValueError(f"not a raysgd control message: its header has {header} bytes, more than {LARGEST_HEADER}")
    return header, body


def receive_message(connection: socket.socket) -> tuple[Message, int]:
    """Return the next message and the size of its body, which follows. Raise ConnectionError when the connection
    ends."""
    header, body = sizes(_exactly(connection, PREFIX.size))
    return decode(_exactly(connection, header)), body


def receive(connection: socket.socket, expected: type[MessageT]) -> MessageT:
    """Return the next message, which must be of this type and have no body."""
    message, size = receive_message(connection)
    if not isinstance(message, expected) or size:
        raise ValueError(f"received {type(message).__name__} instead of {expected.__name__}")
    return message


def receive_body(connection: socket.socket, size: int, moved: Callable[[], None] = lambda: None) -> Body:
    """Return a message's body, read directly to where it stays. Call `moved` whenever a part has arrived."""
    body = make_room(size)
    receive_into(connection, memoryview(body), moved)
    if isinstance(body, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        body.madvise(mmap.MADV_DONTNEED)  # the system may keep it only in the file until it is read
    return body


def receive_into(connection: socket.socket, room: memoryview, moved: Callable[[], None] = lambda: None) -> None:
    """Fill the buffer. Call `moved` whenever a part has arrived."""
    while room:
        room = room[receive_some(connection, room[:PIECE]) :]
        moved()


def receive_some(connection: socket.socket, room: memoryview) -> int:
    """Fill a part of the buffer, and return the size of that part. Raise TimeoutError if the other machine does not
    respond."""
    try:
        count = connection.recv_into(room)
    except OSError as error:
        raise as_timeout(error) from None
    if count == 0:
        raise ConnectionError("the connection ended early")
    return count


def detect_unreachable(connection: socket.socket, limit_s: float) -> None:
    """Enable TCP keepalive, so that reading raises TimeoutError when the other machine has not responded for `limit_s`.
    Its kernel responds even if the process is stopped or busy. Options that this system lacks are skipped."""
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
    """Return a TimeoutError for errors that mean an unreachable machine, and other errors as they are. (If a machine in
    the same network is switched off, the error is "no route to host".)"""
    return TimeoutError(str(error)) if error.errno in UNREACHABLE else error


def _exactly(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    receive_into(connection, memoryview(data))
    return data


def make_room(size: int) -> Body:
    """Return a buffer for a body. A large one (a full state) is a temporary file without a name, so that a driver on a
    small machine does not need the memory for it."""
    if size < LARGE or not hasattr(os, "posix_fallocate"):
        return bytearray(size)
    try:
        with tempfile.TemporaryFile(prefix="raysgd-") as file:
            os.posix_fallocate(file.fileno(), 0, size)  # now, because a full disk could not be reported later
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        logger.info("keeping %d bytes in memory, because no temporary file can hold them: %s", size, error)
        return bytearray(size)
