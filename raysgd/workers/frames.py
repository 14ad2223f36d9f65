"""How a line speaks: a length-prefixed JSON header, and a body of raw bytes that may be empty.

No pickle here: whoever finds the port can at worst send a message that is refused.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable
from typing import Any

from raysgd.workers.landing import Landing, landed, landing

__all__ = ["Frame", "FrameReader", "probe", "receive", "send"]

PREFIX = struct.Struct(">IQ")
LARGEST_HEADER = 16 << 20
AT_ONCE = 1 << 16

Frame = tuple[dict[str, Any], Landing]


def send(connection: socket.socket, message: dict[str, Any], body: bytes | memoryview = b"") -> None:
    """Blocks until the frame is handed to the kernel."""
    header = json.dumps(message, default=str).encode()
    size = memoryview(body).nbytes
    connection.sendall(PREFIX.pack(len(header), size) + header)
    if size:
        connection.sendall(body)


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
            raise ValueError(f"a frame's header claims {header} bytes: this is not one of our lines")
        if len(self._buffer) < PREFIX.size + header:
            return False
        self._message = json.loads(bytes(self._buffer[PREFIX.size : PREFIX.size + header]))
        del self._buffer[: PREFIX.size + header]
        if not isinstance(self._message, dict):
            raise ValueError("a frame's header is no JSON object: this is not one of our lines")
        self._admit(self._message)
        self._body, self._filled = landing(body), 0
        return True


def receive(connection: socket.socket, reader: FrameReader) -> list[Frame] | None:
    """What one read gives; None when the other end is gone. Nothing within the socket's limit is a TimeoutError."""
    room = reader.room()
    try:
        if room:
            count = connection.recv_into(room)
            return reader.fill(count) if count else None
        data = connection.recv(AT_ONCE)
    except TimeoutError:
        raise
    except OSError:
        return None
    return reader.feed(data) if data else None
