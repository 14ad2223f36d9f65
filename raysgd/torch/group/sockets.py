"""Finds a process group's TCP connections, to free waiting ranks when it ends. Worker."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator

Address = tuple[str, int]


class GlooConnections:
    """Owns the addresses at which gloo listens, in this process and in its peers, the address of
    their store, and a copy of each of gloo's connections. Each connection has one end at such an
    address, so they are found exactly: no other connection is ever shut down.

    gloo opens its listening sockets inside torch's call that makes a process group, and torch does
    not report their ports. So the listening sockets that appear during that call count as gloo's.
    `shut` may be called from any thread, also during that call: then the peers' addresses are not
    known yet, and each rank shuts down the connections that its peers made.

    gloo ends a collective call when it reads the end of a connection. But it forgets a message that
    it has not sent completely, or has received in part: if a call waits for that message, it waits
    until its time limit (docs/design/gloo-lost-send.md). So no connection should refuse to be
    written to while a rank of the group could be in a call: `shut` ends only what this rank
    receives. The copies keep a connection open after gloo has closed it, because its peer could not
    write to a closed one. What remains cannot be prevented here: the kernel ends the connections of
    a killed peer, also in the middle of a message. `end` ends what is sent, which the peers read as
    the end, and `forget` closes the copies before the next group is formed.
    """

    def __init__(self) -> None:
        self._before: set[Address] | None = None
        self._listeners: set[Address] = set()
        self._remote: set[Address] = set()
        self._store: set[Address] = set()
        self._copies: dict[int, socket.socket] = {}  # by the kernel's number

    def __reduce__(self) -> tuple[type[GlooConnections], tuple[()]]:
        return GlooConnections, ()  # another process has sockets of its own

    @contextlib.contextmanager
    def forming(self) -> Iterator[None]:
        """A context for the call that makes a process group."""
        self._before = set(_listening())
        try:
            yield
        finally:
            self._listeners |= set(_listening()) - self._before
            self._before = None

    @property
    def own(self) -> list[Address]:
        """Where gloo listens in this process."""
        return sorted(self._listeners)

    def add_store(self, addresses: Iterable[tuple[str, int]]) -> None:
        """Add the addresses of the group's store."""
        self._store |= {_plain(address) for address in addresses}

    def add_remote(self, addresses: Iterable[tuple[str, int]]) -> None:
        """Add the addresses at which the peers' gloo listens."""
        self._remote |= {_plain(address) for address in addresses}

    def hold(self) -> None:
        """Copy those of gloo's connections that are open now."""
        before = self._before
        listeners = self._listeners if before is None else self._listeners | set(_listening()) - before
        for connection in _sockets(listening=False):
            with contextlib.suppress(OSError):  # the connection has ended meanwhile
                if _plain(connection.getsockname()) in listeners or _plain(connection.getpeername()) in self._remote:
                    number = os.fstat(connection.fileno()).st_ino
                    if number not in self._copies:
                        # Not `connection.dup()`, which would make the connection blocking, also for gloo.
                        self._copies[number] = _copy(connection.fileno())

    def shut(self) -> None:
        """Free this rank from a call, or from the store, in which it waits."""
        self.hold()
        self._shut_held(socket.SHUT_RD)
        for connection in _sockets(listening=False) if self._store else ():
            with contextlib.suppress(OSError):
                if _plain(connection.getpeername()) in self._store:
                    connection.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Show the peers that this rank has left, when it is in no call of the group any more."""
        self._shut_held(socket.SHUT_WR)

    def _shut_held(self, how: int) -> None:
        for connection in list(self._copies.values()):
            with contextlib.suppress(OSError):  # the connection has ended meanwhile
                connection.shutdown(how)

    def forget(self) -> None:
        """Forget the group, and close its connections."""
        self._listeners, self._remote, self._store = set(), set(), set()
        while self._copies:
            self._copies.popitem()[1].close()


class Connections:
    """Owns the names of all sockets that appeared between a call of `opening` and one of `opened`
    since `forget`. It is for NCCL and Horovod, whose ports are not known; a connection of another
    thread can be among these sockets.

    `shut` may be called from any thread, also between `opening` and `opened`. It also ends those
    that are `listening`, at which NCCL waits for peers; gloo treats that as fatal.
    """

    def __init__(self, listening: bool = False) -> None:
        self._listening = listening
        self._before: set[str] | None = None
        self._mine: set[str] = set()

    def __reduce__(self) -> tuple[type[Connections], tuple[bool]]:
        return Connections, (self._listening,)  # another process has sockets of its own

    def opening(self) -> None:
        self._before = _names()

    def opened(self) -> None:
        if self._before is not None:
            now = _names()
            self._mine = self._mine & now | now - self._before
        self._before = None

    def shut(self) -> bool:
        """End these connections. Return whether more of them can appear."""
        before = self._before
        names = self._mine if before is None else self._mine | _names() - before
        for listening in (False, True) if self._listening else (False,):
            for connection in _sockets(listening=listening, names=names):
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        return before is not None

    def forget(self) -> None:
        self._before, self._mine = None, set()


def _names() -> set[str]:
    """This process's sockets by the kernel's names, which copies share."""
    return set(_descriptors())


def _descriptors() -> dict[str, int]:
    descriptors: dict[str, int] = {}
    for descriptor in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if name.startswith("socket:"):
                descriptors[name] = int(descriptor)
    return descriptors


def _listening() -> Iterator[Address]:
    return (_plain(each.getsockname()) for each in _sockets(listening=True))


def _sockets(*, listening: bool, names: set[str] | None = None) -> Iterator[socket.socket]:
    """Yield copies of this process's TCP sockets, of those that listen or of the others."""
    for name, descriptor in _descriptors().items():
        if names is not None and name not in names:
            continue
        with contextlib.suppress(OSError), _copy(descriptor) as copy:
            stream = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM
            if stream and bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) is listening:
                yield copy


def _copy(descriptor: int) -> socket.socket:
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:  # another thread has closed the socket, and its number belongs to a file now
        os.close(copy)
        raise


def _plain(address: tuple[object, ...]) -> Address:
    """Host and port, the same for an IPv4 address and for its form in IPv6."""
    return str(address[0]).removeprefix("::ffff:").partition("%")[0], int(str(address[1]))
