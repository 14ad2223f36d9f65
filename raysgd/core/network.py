"""Find the address by which this machine reaches another one, and listen for other machines.
Both."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable

from raysgd.config import CONTROL_PORT
from raysgd.errors import ConfigError

LOOPBACK = "127.0.0.1"
ANY_PORT = 9
OUTSIDE = "8.8.8.8"  # any address that is not in a network of this machine; nothing is sent there
BACKLOG = 1024


def address_towards(host: str) -> str:
    """Return the address of this machine from which packets to `host` are sent. Sends nothing.
    Raise OSError if there is no route."""
    family, _, _, _, there = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)
        return str(probe.getsockname()[0])


def own_address() -> str:
    """Return the address of this machine on its default route; without one, that of its name, or
    the loopback address. (A name may not resolve, or to an address that other machines have
    too.)"""
    try:
        return address_towards(OUTSIDE)
    except OSError:
        pass
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return LOOPBACK


def listen(host: str, ports: Iterable[int] | None) -> socket.socket:
    """Return a socket that listens on `host`, at the first of these ports that is free, or at one
    that the system chooses. Raise OSError if this machine does not have that address."""
    family, _, _, _, (address, *_) = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    for port in (0,) if ports is None else ports:
        try:
            return socket.create_server((str(address), port), family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise ConfigError(
        f"every port that the environment variable {CONTROL_PORT} allows is in use on this machine, by another trainer or "
        "another program: set a range such as 7000-7020. A trainer needs one port, and two for its process groups"
    )
