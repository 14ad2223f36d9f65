"""The connections that a meeting opened, to be shut when it is over: whoever waits on one falls out at once."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

__all__ = ["Connections"]


class Connections:
    """Owns the names of the sockets that came up between `opening` and `opened`, in as many such times as there were since
    `forget`. Knows nothing of what they carry.

    `shut` may be called from any thread, in the middle of a meeting too.
    """

    def __init__(self) -> None:
        self._before: set[str] | None = None
        self._mine: set[str] = set()

    def __reduce__(self) -> tuple[type[Connections], tuple[()]]:
        return Connections, ()  # another process has sockets of its own

    def opening(self) -> None:
        self._before = _names()

    def opened(self) -> None:
        if self._before is not None:
            now = _names()
            self._mine = self._mine & now | now - self._before
        self._before = None

    def shut(self) -> None:
        before = self._before
        names = self._mine if before is None else self._mine | _names() - before
        for connection in _open(names):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        self._mine = set()


def _names() -> set[str]:
    """This process's sockets, as the kernel names them ("socket:[inode]"): copies of a descriptor share a name."""
    return set(_descriptors())


def _descriptors() -> dict[str, int]:
    found: dict[str, int] = {}
    for descriptor in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if name.startswith("socket:"):
                found[name] = int(descriptor)
    return found


def _open(names: set[str]) -> Iterator[socket.socket]:
    """The connected ones of these sockets, as copies. Listening ones are left alone: gloo takes their end as fatal."""
    for name, descriptor in _descriptors().items():
        if name not in names:
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            inet = connection.family in (socket.AF_INET, socket.AF_INET6)
            if inet and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                yield connection
