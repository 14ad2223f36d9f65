"""Find the address by which this machine reaches another one, listen for others, and make sure that
this process may open a connection for each of them. Both."""

from __future__ import annotations

import errno
import logging
import resource
import socket
from collections.abc import Iterable

from raysgd.environment import CONTROL_PORT
from raysgd.errors import ConfigError, ResourceError, counted

logger = logging.getLogger("raysgd")

LOOPBACK = "127.0.0.1"
ANY_PORT = 9
OUTSIDE = "8.8.8.8"  # any address that is not in a network of this machine; nothing is sent there
BACKLOG = 1024
OWN_FILES = 256  # files that a process opens without any worker: Python, Ray, torch, files of the user


def address_towards(host: str) -> str:
    """Find this machine's address towards `host`. Sends nothing. OSError: there is no route."""
    family, _, _, _, there = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)
        return str(probe.getsockname()[0])


def own_address() -> str:
    """Find this machine's address on its default route, or that of its name, which may not resolve,
    or the loopback address."""
    try:
        return address_towards(OUTSIDE)
    except OSError:
        pass
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return LOOPBACK


def listen(what: str, host: str, ports: Iterable[int] | None) -> socket.socket:
    """Open a socket that listens on `host`, at the first of these ports that is free, or at one
    that the system chooses. If this machine does not have that address, because others reach it
    through NAT, `what` listens on all addresses."""
    try:
        return _listen(host, ports)
    except OSError as error:
        logger.info("%s listens on all addresses, because %s cannot be bound: %s", what, host, error)
        return _listen("0.0.0.0", ports)


def _listen(host: str, ports: Iterable[int] | None) -> socket.socket:
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


def allow_connections(workers: int, *, each: int) -> None:
    """Raise this process's limit of open files if it is too low for `each` connections to so many
    workers. Raise ResourceError if the system does not allow that.

    The soft limit is raised only as far as needed, because old programs that inherit a high one can
    become slow.
    """
    needed = OWN_FILES + each * workers
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ResourceError(
            f"this process may have {hard} open files, and with {counted(workers, 'worker')} it needs about {needed} ({each} connections "
            f"for each of them, and {OWN_FILES} others). Raise the limit before the script and Ray start: with `ulimit -Hn {needed}` as "
            "root, in /etc/security/limits.conf, with LimitNOFILE= of the systemd unit, or with --ulimit nofile= of the "
            "container; or use fewer workers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
