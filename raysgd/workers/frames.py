"""How a line speaks: a length-prefixed JSON header, and a body of raw bytes that may be empty.

No pickle here: whoever finds the port can at worst send a message that is refused.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

__all__ = ["FrameReader", "probe", "receive", "send"]

PREFIX = struct.Struct(">IQ")
LARGEST_HEADER = 16 << 20


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
    """Cuts a stream of bytes into frames. Holds what has come of the frame in work."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[dict[str, Any], bytes]]:
        self._buffer += data
        frames = []
        while len(self._buffer) >= PREFIX.size:
            header, body = PREFIX.unpack_from(self._buffer)
            if header > LARGEST_HEADER:
                raise ValueError(f"a frame's header claims {header} bytes: this is not one of our lines")
            end = PREFIX.size + header + body
            if len(self._buffer) < end:
                break
            message = json.loads(bytes(self._buffer[PREFIX.size : PREFIX.size + header]))
            frames.append((message, bytes(self._buffer[PREFIX.size + header : end])))
            del self._buffer[:end]
        return frames


def receive(connection: socket.socket, reader: FrameReader) -> list[tuple[dict[str, Any], bytes]] | None:
    """What one read gives; None when the other end is gone. A machine that does not answer is a TimeoutError."""
    try:
        data = connection.recv(1 << 20)
    except TimeoutError:
        raise
    except OSError:
        return None
    return reader.feed(data) if data else None
