"""The store for the rendezvous of ranks: the driver opens one for each generation. Both."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from raysgd.core.channel.network import LOOPBACK, listen
from raysgd.core.ranks import RankInfo
from raysgd.environment import control_ports

logger = logging.getLogger("raysgd")

SECRET_BYTES = 16
FIRST_TRY_S = 5.0
MORE_CLIENTS_S = (1.0, 2.0)  # a second client starts after one second, a third one two seconds later


# -- driver -------------------------------------------------------------------------------------------


def open_store(host: str, *, limit_s: float) -> tuple[Any, dict[str, Any]]:
    """Make a new store, and what a rank needs to connect to it. Every key begins with a secret,
    which is new in each generation."""
    store = _listen(host, datetime.timedelta(seconds=limit_s))
    return store, {"host": host, "port": store.port, "secret": secrets.token_hex(SECRET_BYTES)}


def _listen(host: str, limit: datetime.timedelta) -> Any:
    """Make a store that listens on `host` only, if this machine has that address.

    A torch that was built without libuv has only an older server, which an incomplete message from
    any client blocks forever."""
    try:
        return _server(host, limit, use_libuv=True)
    except (ValueError, RuntimeError) as error:
        if "libuv" not in str(error):
            raise
    return _server(host, limit, use_libuv=False)


def _server(host: str, limit: datetime.timedelta, *, use_libuv: bool) -> Any:
    listener = listen("the rendezvous store", host, None if host == LOOPBACK else control_ports())
    port, inode = listener.getsockname()[1], os.fstat(listener.fileno()).st_ino
    number = listener.detach()
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            host, port, None, True, timeout=limit, wait_for_workers=False, use_libuv=use_libuv, master_listen_fd=number
        )
    except BaseException:
        # After Ctrl-C, the store may have taken the socket and closed it. Another file can have its number then.
        with contextlib.suppress(OSError):
            if os.fstat(number).st_ino == inode:
                os.close(number)
        raise


# -- worker -------------------------------------------------------------------------------------------


def connect(settings: Mapping[str, Any], *, limit_s: float) -> Any:
    """Connect to the store of this rank's generation. It puts the generation's secret in front of
    every key.

    The driver opens the store before it calls any rank, and closes it when the generation ends.
    torch's client cannot know that, and would try to reach a closed store until its time limit. So
    this function keeps a connection of its own to the store: when that ends, the generation has
    ended, and the function raises an error at once. Until then it waits for slow attempts, because
    all cores of a machine can be busy.
    """
    deadline = time.monotonic() + limit_s
    ended = "this generation has ended, or its rendezvous store cannot be reached"
    try:
        watch = socket.create_connection((settings["host"], settings["port"]), timeout=limit_s)
    except OSError as error:
        raise dist.DistNetworkError(f"{ended}: {error}") from error
    with watch, _Clients(settings, deadline) as clients, selectors.DefaultSelector() as readable:
        for each in (watch, clients.done):
            readable.register(each, selectors.EVENT_READ)
        for until_next_s in (*MORE_CLIENTS_S, limit_s):
            clients.add()
            left_s = max(deadline - time.monotonic(), 0.0)
            if readable.select(min(until_next_s, left_s)):
                break
        store = clients.first()
    if store is None:
        raise dist.DistNetworkError(ended)
    store.set_timeout(datetime.timedelta(seconds=limit_s))
    return dist.PrefixStore(settings["secret"], store)  # type: ignore[attr-defined]


class _Clients:
    """Owns the threads in which torch's clients connect. `done` becomes readable when one has
    connected or failed.

    torch's client asks the name server for the host's name, only to log it. A lost answer costs 5
    seconds, so another client is started when one is slow.
    """

    def __init__(self, settings: Mapping[str, Any], deadline: float) -> None:
        self._settings, self._deadline = settings, deadline
        self._store: Any = None
        self._error: Exception | None = None
        self._wanted = True
        self.done, self._signal = socket.socketpair()

    def __enter__(self) -> _Clients:
        return self

    def __exit__(self, *problem: object) -> None:
        self._wanted = False
        self.done.close()

    def add(self) -> None:
        # Not a daemon: Python ends daemon threads at exit wherever they are, and inside torch's code that aborts the process.
        threading.Thread(target=self._connect, name="raysgd-store", daemon=False).start()

    def first(self) -> Any:
        """The first store that was reached, or None; raise a client's error if none was."""
        if self._store is None and self._error is not None:
            raise self._error
        return self._store

    def _connect(self) -> None:
        """Try to connect until it works, the time is up, or the client is not needed any more. Each
        attempt has a limit, so that the thread ends soon after the generation."""
        try_s = FIRST_TRY_S
        while self._wanted and self._store is None:
            timeout = datetime.timedelta(seconds=min(try_s, max(self._deadline - time.monotonic(), 1.0)))
            try:
                store = dist.TCPStore(  # type: ignore[attr-defined]
                    self._settings["host"], self._settings["port"], None, False, timeout=timeout
                )
            except Exception as error:  # raised in the thread that waits
                try_s *= 2
                if isinstance(error, dist.DistNetworkError) and time.monotonic() < self._deadline:
                    continue
                self._error = error
            else:
                self._store = self._store or store
            with contextlib.suppress(OSError):  # the waiting thread may have closed the other end
                self._signal.send(b".")
            return


def wait_for_all(store: Any, rank_info: RankInfo, *, limit_s: float) -> None:
    """Wait until every rank is connected to the store, or the driver closes it. So a peer for which
    a rank waits after this has failed."""
    _meet(store, "here", rank_info, limit_s)


def _meet(store: Any, place: str, rank_info: RankInfo, limit_s: float) -> None:
    """Wait until every rank has called this. Each rank is counted, and the last one sets the only
    key for which all wait, so a rank makes the same few requests in a group of any size."""
    if store.add(place, 1) == rank_info.world_size:
        store.set(f"{place}-all", "")
    store.wait([f"{place}-all"], datetime.timedelta(seconds=limit_s))


def exchange_addresses(
    store: Any, rank_info: RankInfo, listeners: Sequence[tuple[str, int]], *, limit_s: float
) -> list[tuple[str, int]]:
    """Publish the addresses at which gloo listens in this process. Return those of all ranks."""
    store.append("gloo", "".join(f"{json.dumps(address)}," for address in listeners))
    _meet(store, "gloo-addresses", rank_info, limit_s)
    addresses = json.loads(f"[{store.get('gloo').decode().rstrip(',')}]")
    return [(str(host), int(port)) for host, port in addresses]


def addresses_of(settings: Mapping[str, Any]) -> list[tuple[str, int]]:
    """The addresses at which this rank can reach the store."""
    try:
        infos = socket.getaddrinfo(settings["host"], settings["port"], type=socket.SOCK_STREAM)
    except OSError as error:
        raise dist.DistNetworkError(f"the host of the rendezvous store cannot be resolved: {error}") from error
    return [(str(address[0]), int(address[1])) for *_, address in infos]


@contextlib.contextmanager
def without_secret(settings: Mapping[str, Any]) -> Iterator[None]:
    """Remove the secret from torch's errors, which name keys, and appear in logs."""
    secret = settings.get("secret")
    try:
        yield
    except RuntimeError as error:
        if secret is None or secret not in str(error):
            raise
        raise type(error)(str(error).replace(secret, "***")) from None
