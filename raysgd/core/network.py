"""Find the address by which this machine reaches another one. Both."""

from __future__ import annotations

import socket

__all__ = ["address_towards"]

ANY_PORT = 9


def address_towards(host: str) -> str:
    """Return the address of this machine from which packets to `host` are sent. Sends nothing. Raise OSError if there is
    no route."""
    family, _, _, _, there = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)
        return str(probe.getsockname()[0])
