"""The format of the control channel: a length-prefixed JSON header, and a body of raw bytes that may be empty.

A connection begins with the driver's token, as TOKEN_BYTES raw bytes; nothing else is read or parsed before that is
verified. Then comes the header of the first message. The driver answers with the byte ADMITTED when it has accepted
that, and with the byte RECEIVED when it has the whole of a message that has a connection of its own. No pickle here.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable
from typing import Any

from raysgd.workers.landing import Landing, landed, landing

__all__ = [
    "ADMITTED",
    "RECEIVED",
    "TOKEN_BYTES",
    "Frame",
    "FrameReader",
    "packed",
    "probe",
    "receive",
    "send",
    "send_body",
    "send_now",
]

TOKEN_BYTES = 32
ADMITTED, RECEIVED = b"A", b"R"
PREFIX = struct.Struct(">IQ")
LARGEST_HEADER = 16 << 20
AT_ONCE = 1 << 16
PIECE = 4 << 20

Frame = tuple[dict[str, Any], Landing]


def packed(message: dict[str, Any], size: int = 0) -> bytes:
    """Return a frame without its body, which has `size` bytes."""
    header = json.dumps(message, default=str).encode()
    if len(header) > LARGEST_HEADER:
        raise ValueError(f"a control message of {len(header)} bytes is too long: at most {LARGEST_HEADER} are allowed")
    return PREFIX.pack(len(header), size) + header


def send(connection: socket.socket, message: dict[str, Any], body: bytes | memoryview = b"") -> None:
    """Send a frame. Blocks until the kernel has it."""
    connection.sendall(packed(message, memoryview(body).nbytes))
    send_body(connection, body)


def send_body(connection: socket.socket, body: bytes | memoryview) -> None:
    """Send a frame's body in pieces, so that the socket's timeout limits a standstill and not the whole transfer."""
    view = memoryview(body).cast("B") if len(body) else memoryview(b"")
    for start in range(0, len(view), PIECE):
        connection.sendall(view[start : start + PIECE])


def send_now(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send a frame without a body on a non-blocking socket. Raise BlockingIOError when the kernel has no room for all of
    it: the other end has not read for a long time, and the connection cannot be used any more."""
    frame = packed(message)
    if connection.send(frame) < len(frame):
        raise BlockingIOError("only a part of the message could be sent")


def probe(connection: socket.socket, limit_s: float) -> None:
    """Lets the kernel ask the other machine's kernel whether it is there, all the time: reading raises TimeoutError when
    it is not. A process that is stopped, or busy, answers by its kernel. What a system cannot set is left as it is."""
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


class FrameReader:
    """Cuts a stream of bytes into frames. Holds what has come of the frame in work; a body is read to where it stays.

    `admit` sees each header before there is room for its body, and raises ValueError for one that is none of ours.
    """

    def __init__(self, admit: Callable[[dict[str, Any]], None] = lambda message: None) -> None:
        self._admit = admit
        self._buffer = bytearray()
        self._message: dict[str, Any] = {}
        self._body: Landing | None = None
        self._filled = 0

    def room(self) -> memoryview:
        """Where the next bytes go, when they belong to a body; empty when they do not."""
        return memoryview(b"" if self._body is None else self._body)[self._filled :]

    def feed(self, data: bytes) -> list[Frame]:
        self._buffer += data
        frames: list[Frame] = []
        while self._buffer:
            if self._body is None and not self._begin():
                break
            piece = self._buffer[: len(self.room())]
            self.room()[: len(piece)] = piece
            del self._buffer[: len(piece)]
            frames += self.fill(len(piece))
        return frames

    def fill(self, count: int) -> list[Frame]:
        """So many bytes were put into the room."""
        assert self._body is not None
        self._filled += count
        if self._filled < len(self._body):
            return []
        frame = self._message, landed(self._body)
        self._body = None
        return [frame]

    def _begin(self) -> bool:
        """Reads a frame's header, when it is there as a whole."""
        if len(self._buffer) < PREFIX.size:
            return False
        header, body = PREFIX.unpack_from(self._buffer)
        if header > LARGEST_HEADER:
            raise ValueError(f"it sent a header of {header} bytes, and at most {LARGEST_HEADER} are allowed")
        if len(self._buffer) < PREFIX.size + header:
            return False
        self._message = json.loads(bytes(self._buffer[PREFIX.size : PREFIX.size + header]))
        del self._buffer[: PREFIX.size + header]
        if not isinstance(self._message, dict):
            raise ValueError("it sent a header that is not a JSON object")
        self._admit(self._message)
        self._body, self._filled = landing(body), 0
        return True


def receive(connection: socket.socket, reader: FrameReader) -> list[Frame] | None:
    """Return the frames that one read completes; None when the other end is gone. A connection whose other end does not
    acknowledge anything any more raises TimeoutError."""
    room = reader.room()
    try:
        if room:
            count = connection.recv_into(room)
            return reader.fill(count) if count else None
        data = connection.recv(AT_ONCE)
    except TimeoutError:
        raise
    except BlockingIOError:
        return []
    except OSError:
        return None
    return reader.feed(data) if data else None
