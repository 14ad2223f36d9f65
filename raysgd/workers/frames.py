"""How a line speaks: a length-prefixed JSON header, and a body of raw bytes that may be empty.

No pickle here: whoever finds the port can at worst send a message that is refused.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

__all__ = ["FrameReader", "receive", "send"]

PREFIX = struct.Struct(">IQ")
LARGEST_HEADER = 16 << 20


def send(connection: socket.socket, message: dict[str, Any], body: bytes | memoryview = b"") -> None:
    """Blocks until the frame is handed to the kernel."""
    header = json.dumps(message, default=str).encode()
    size = memoryview(body).nbytes
    connection.sendall(PREFIX.pack(len(header), size) + header)
    if size:
        connection.sendall(body)


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
    """What one read gives; None when the other end is gone."""
    try:
        data = connection.recv(1 << 20)
    except OSError:
        return None
    return reader.feed(data) if data else None
