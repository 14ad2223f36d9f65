"""Find the TCP connections of a process group, to shut them down when it ends: a rank that waits on one is freed at once. Worker."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator

__all__ = ["Connections", "GlooConnections"]

Address = tuple[str, int]


class GlooConnections:
    """Owns the addresses at which gloo listens, in this process and in its peers, and the address of their store. Each of
    gloo's connections has one end at such an address, so they are found exactly: no other connection is ever shut down.

    gloo opens its listening sockets inside of torch's call that makes a process group, and torch does not report their
    ports. So they are the listening sockets that appeared during that call. `shut` may be called from any thread, also
    during it: then the peers' addresses are not known yet, and each rank shuts down the connections that its peers made.
    """

    def __init__(self) -> None:
        self._before: set[Address] | None = None
        self._own: set[Address] = set()
        self._remote: set[Address] = set()

    def __reduce__(self) -> tuple[type[GlooConnections], tuple[()]]:
        return GlooConnections, ()  # another process has sockets of its own

    @contextlib.contextmanager
    def forming(self) -> Iterator[None]:
        """Surround the call that makes a process group."""
        self._before = set(_listening())
        try:
            yield
        finally:
            self._own |= set(_listening()) - self._before
            self._before = None

    @property
    def own(self) -> list[Address]:
        """Where gloo listens in this process."""
        return sorted(self._own)

    def add_remote(self, addresses: Iterable[tuple[str, int]]) -> None:
        """Connections to these are the group's: the peers' own addresses, and the store's."""
        self._remote |= {_plain(address) for address in addresses}

    def shut(self) -> None:
        before = self._before
        own = self._own if before is None else self._own | set(_listening()) - before
        for connection in _sockets(listening=False):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if _plain(connection.getsockname()) in own or _plain(connection.getpeername()) in self._remote:
                    connection.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        self._own, self._remote = set(), set()


class Connections:
    """Owns the names of the sockets that came up between `opening` and `opened`, in as many such times as there were since
    `forget`. Knows nothing of what they carry: for NCCL and Horovod, whose ports are not known.

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
    return _sockets(listening=False, names=names)


def _listening() -> Iterator[Address]:
    """Return where this process listens."""
    return (_plain(each.getsockname()) for each in _sockets(listening=True))


def _sockets(*, listening: bool, names: set[str] | None = None) -> Iterator[socket.socket]:
    """Yield copies of this process's TCP sockets: those that listen, or those that do not."""
    for name, descriptor in _descriptors().items():
        if names is not None and name not in names:
            continue
        with contextlib.suppress(OSError), _copy(descriptor) as found:
            stream = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
            if stream and bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) is listening:
                yield found


def _copy(descriptor: int) -> socket.socket:
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:  # another thread has closed it, and a file has its number now
        os.close(copy)
        raise


def _plain(address: tuple[object, ...]) -> Address:
    """Return host and port, the same for an IPv4 address and for its form in IPv6."""
    return str(address[0]).removeprefix("::ffff:").partition("%")[0], int(str(address[1]))
