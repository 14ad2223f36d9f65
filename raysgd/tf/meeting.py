"""Where the ranks of a generation learn each other's addresses. Standard library only.

TensorFlow wants every rank's address before its own server starts. So each rank first takes a port of its own, tells
it to the driver, and waits until all have done so.
"""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import socket
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["MeetingFailed", "MeetingPoint", "meet", "own_port"]


PORTS = (15000, 32000)


class MeetingFailed(OSError):
    """Not all ranks came, or the driver called the meeting off."""


class MeetingPoint:
    """Driver: owns a listening socket (its port is bound, not guessed) and a thread, for one generation."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.token = secrets.token_hex(16)
        self._listener = socket.create_server(("", 0))
        self.port: int = self._listener.getsockname()[1]
        self._guests: dict[int, tuple[socket.socket, str]] = {}
        self._thread = threading.Thread(target=self._serve, name="raysgd-meeting", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Whoever still waits is freed."""
        for each in (self._listener, *(guest for guest, _ in list(self._guests.values()))):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed: the meeting is off
            while len(self._guests) < self._size:
                guest, _ = self._listener.accept()
                self._welcome(guest)
            addresses = [address for _, (_, address) in sorted(self._guests.items())]
            for guest, _ in self._guests.values():
                guest.sendall(json.dumps(addresses).encode() + b"\n")

    def _welcome(self, guest: socket.socket) -> None:
        guest.settimeout(10)
        try:
            said = _line(guest)
        except (OSError, ValueError):
            guest.close()
            return
        if said.get("token") != self.token:
            guest.close()
            return
        self._guests[int(said["rank"])] = (guest, said["address"])


def meet(host: str, port: int, token: str, *, rank: int, own: int, limit_s: float) -> list[str]:
    """Worker: tells the port `own` of this rank, and waits for everybody's address, in rank order."""
    try:
        with socket.create_connection((host, port), timeout=limit_s) as connection:
            name = connection.getsockname()[0]
            address = f"[{name}]:{own}" if ":" in name else f"{name}:{own}"
            connection.sendall(json.dumps({"token": token, "rank": rank, "address": address}).encode() + b"\n")
            addresses: list[str] = _line(connection)
            return addresses
    except (OSError, ValueError) as error:
        raise MeetingFailed(f"the ranks did not meet at {host}:{port} within {limit_s:g} s: {error}") from error


@contextlib.contextmanager
def own_port() -> Iterator[int]:
    """A port that a server of this process can take when the block has ended.

    TensorFlow's server takes a number only, no open socket. So the port is held while the ranks meet (neighbours
    choose at the same time), and lies below the range from which systems give ports to outgoing connections.
    """
    for _ in range(100):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held:
            try:
                held.bind(("", random.SystemRandom().randrange(*PORTS)))
            except OSError:
                continue
            yield held.getsockname()[1]
            return
    raise MeetingFailed(f"no free port was found between {PORTS[0]} and {PORTS[1]}")


def _line(connection: socket.socket) -> Any:
    data = b""
    while not data.endswith(b"\n"):
        more = connection.recv(1 << 16)
        if not more:
            raise ConnectionError("the other side closed the connection")
        data += more
    return json.loads(data)
