"""The driver's end of the control channel: accepts workers' connections, and turns what they send into events."""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import queue
import secrets
import selectors
import socket
import threading
import time
from functools import partial
from typing import Any

from raysgd.workers.events import Arrived, Event, Gone, Heard
from raysgd.workers.frames import ADMITTED, RECEIVED, TOKEN_BYTES, FrameReader, probe, receive, send_now
from raysgd.workers.landing import Landing

__all__ = ["Switchboard"]

logger = logging.getLogger(__name__)

ENDED = "its process ended (its control connection was closed)"

# Limits on what a client without the token can hold: this many connections, each for this long, each with one token's
# worth of bytes. A worker sends its greeting at once.
GREETING_S = 5.0
GREETING_AT_MOST = 128

BACKLOG = 1024
ACCEPT_PAUSE_S = 1.0
NO_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
LOG_LINES, LOG_EVERY_S = 5, 30.0


class _Peer:
    """One connection. It is admitted when its greeting is complete: the token and the header of a first message."""

    def __init__(self, connection: socket.socket, address: Any) -> None:
        self.connection = connection
        self.address = f"{address[0]}:{address[1]}"
        self.deadline = time.monotonic() + GREETING_S
        self.token = bytearray()
        self.admitted = False
        self.worker: str | None = None  # whose control connection this is; None: it carries a single message
        self.broken = ""
        self.reader = FrameReader()


class Switchboard:
    """Owns the listening socket, all accepted connections and one thread. Turns what comes in into events; decides nothing.

    A worker's connection that ends is a `Gone` event within a millisecond of the process's death, usually before Ray
    reports it. One whose other end does not even acknowledge bytes for `unreachable_s` ends too: that machine, or the
    way to it, is gone. An error in what one connection sends ends that connection, and never the thread.
    """

    def __init__(self, events: queue.Queue[Event], host: str) -> None:
        self.token = secrets.token_hex(TOKEN_BYTES // 2)
        self.unreachable_s = 60.0
        self._events = events
        self._peers: dict[str, _Peer] = {}
        self._greeting: dict[_Peer, None] = {}  # those that are not admitted, the oldest first
        self._heard_at: dict[str, float] = {}
        self._sending = threading.Lock()
        self._refusals = _Refusals()
        self._selector = selectors.DefaultSelector()
        self._listener = _listen(host)
        self._listener.setblocking(False)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._accept_again_at: float | None = None
        self._short = False  # of descriptors or memory: said once, until it is over
        self._wake, wakes = socket.socketpair()
        self._selector.register(wakes, selectors.EVENT_READ, None)
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="raysgd-switchboard", daemon=True)
        self._thread.start()

    def tell(self, worker: str, message: dict[str, Any]) -> bool:
        """Send a message to a worker; False when it has no connection, which is, or will be, a `Gone` event. Never blocks."""
        peer = self._peers.get(worker)
        if peer is None:
            return False
        try:
            with self._sending:
                send_now(peer.connection, message)
        except BlockingIOError:
            peer.broken = "it has not read any message for a long time"
            with contextlib.suppress(OSError):
                peer.connection.shutdown(socket.SHUT_RDWR)  # the thread sees the end, and reports it
            return False
        except OSError:
            return False
        return True

    def silent_for(self, worker: str) -> float:
        """Return the seconds since the worker last sent anything (it does so every second)."""
        heard = self._heard_at.get(worker)
        return 0.0 if heard is None else time.monotonic() - heard

    def hang_up(self, worker: str) -> None:
        """Forget a worker that leaves on purpose: the end of its connection is no event."""
        peer = self._peers.pop(worker, None)
        if peer is not None:
            with contextlib.suppress(OSError), self._sending:
                send_now(peer.connection, {"t": "bye"})

    def close(self) -> None:
        for worker in list(self._peers):
            self.hang_up(worker)
        self._closed = True
        self._wake.close()
        self._thread.join(timeout=2)

    # -- the thread -----------------------------------------------------------------------------------

    def _serve(self) -> None:
        while not self._closed:
            try:
                self._serve_once()
            except Exception:
                logger.exception("unexpected error in the control thread, which goes on")
                time.sleep(0.1)
        for key in list(self._selector.get_map().values()):
            with contextlib.suppress(OSError):
                key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _serve_once(self) -> None:
        """Read before accepting: whoever has sent its greeting is admitted before newer connections push it out."""
        ready = [key for key, _ in self._selector.select(timeout=self._pause())]
        for key in ready:
            if key.data is not None:
                self._read(key.data)
        if any(key.fileobj is self._listener for key in ready):
            self._accept()
        now = time.monotonic()
        for peer in [peer for peer in self._greeting if peer.deadline <= now]:
            self._refuse(peer, f"it sent no complete greeting within {GREETING_S:g} s")
        if self._accept_again_at is not None and now >= self._accept_again_at:
            self._accept_again_at = None
            self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._refusals.summarize()

    def _pause(self) -> float:
        """Return the seconds until something is due without any connection's doing."""
        due = [peer.deadline for peer in list(self._greeting)[:1]]
        if self._accept_again_at is not None:
            due.append(self._accept_again_at)
        return max(min([each - time.monotonic() for each in due] + [1.0]), 0.0)

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError as error:
            if error.errno in NO_RESOURCES:
                self._pause_accepting(error)
            return
        self._short = False
        peer = _Peer(connection, address)
        peer.reader = FrameReader(partial(self._admit, peer))
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            probe(connection, self.unreachable_s)
            self._selector.register(connection, selectors.EVENT_READ, peer)
        except OSError as error:  # it has ended already, or the system is out of something
            connection.close()
            self._refusals.add(peer.address, str(error))
            return
        self._greeting[peer] = None
        if len(self._greeting) > GREETING_AT_MOST:
            self._refuse(next(iter(self._greeting)), f"more than {GREETING_AT_MOST} connections without a greeting")

    def _pause_accepting(self, error: OSError) -> None:
        """The waiting connection stays in the kernel's queue, so the listener would be ready again at once."""
        if not self._short:
            logger.warning("cannot accept connections of workers (%s): trying again every %g s", error, ACCEPT_PAUSE_S)
        self._short = True
        self._selector.unregister(self._listener)
        self._accept_again_at = time.monotonic() + ACCEPT_PAUSE_S

    def _read(self, peer: _Peer) -> None:
        try:
            if len(peer.token) < TOKEN_BYTES:
                self._read_token(peer)
                return
            frames = receive(peer.connection, peer.reader)
            if frames is None:
                self._end(peer, peer.broken or ENDED)
                return
            for message, body in frames:
                self._take(peer, message, body)
        except TimeoutError:
            self._end(peer, f"its machine has not answered for {self.unreachable_s:g} s")
        except Exception as error:  # whatever one connection sends, the others are served
            self._refuse(peer, str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}")

    def _read_token(self, peer: _Peer) -> None:
        """Before the token is complete and verified, not one byte behind it is read."""
        try:
            data = peer.connection.recv(TOKEN_BYTES - len(peer.token))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        peer.token += data
        if not data:
            self._end(peer, ENDED)
        elif len(peer.token) == TOKEN_BYTES and not hmac.compare_digest(bytes(peer.token), self.token.encode()):
            raise ValueError("it does not have this trainer's token")

    def _admit(self, peer: _Peer, message: dict[str, Any]) -> None:
        """Check the header of a connection's first message, before there is room for its body."""
        if peer.admitted:
            return
        kind, worker = message.get("t"), message.get("worker")
        if kind not in ("hello", "upload", "message") or not isinstance(worker, str):
            raise ValueError("its first message is not one with which a worker begins")
        if kind == "hello":
            if not isinstance(message.get("node"), str) or not isinstance(message.get("pid"), int):
                raise ValueError("its greeting does not say the worker's node and process")
            if worker in self._peers:
                raise ValueError(f"worker {worker} is connected already")
        peer.admitted = True
        self._greeting.pop(peer)
        peer.connection.send(ADMITTED)

    def _take(self, peer: _Peer, message: dict[str, Any], body: Landing) -> None:
        kind, worker = message.get("t"), peer.worker
        if worker is None and kind == "hello":
            peer.worker = worker = message["worker"]
            self._peers[worker] = peer
            self._events.put(Arrived(worker, message["node"], message["pid"]))
        elif worker is None:
            worker = str(message.get("worker"))
            self._events.put(Heard(worker, message, body))
            with contextlib.suppress(OSError):  # it may have gone since
                peer.connection.send(RECEIVED)
        elif self._peers.get(worker) is not peer:
            return  # `hang_up` was called at this very moment
        elif kind != "alive":
            self._events.put(Heard(worker, message, body))
        self._heard_at[worker] = time.monotonic()

    def _refuse(self, peer: _Peer, why: str) -> None:
        self._end(peer, f"its control connection was closed: {why}")
        self._refusals.add(peer.address, why)

    def _end(self, peer: _Peer, why: str) -> None:
        self._greeting.pop(peer, None)
        with contextlib.suppress(KeyError, ValueError):  # it may not have come so far
            self._selector.unregister(peer.connection)
        peer.connection.close()
        worker = peer.worker
        if worker is None or self._peers.get(worker) is not peer:
            return
        if self._peers.pop(worker, None) is not None:  # else `hang_up` was faster
            self._events.put(Gone(worker, why, "worker death" if why == ENDED else "network"))


class _Refusals:
    """Logs refused connections: a few lines at once, then one line per interval that counts the others."""

    def __init__(self) -> None:
        self._lines = LOG_LINES
        self._others = 0
        self._until = 0.0

    def add(self, address: str, why: str) -> None:
        self.summarize()
        if self._lines == 0:
            self._others += 1
            return
        self._lines -= 1
        logger.warning("refused a connection from %s to the control channel: %s", address, why)

    def summarize(self) -> None:
        """Begin a new interval, if it is time."""
        now = time.monotonic()
        if now < self._until:
            return
        if self._others:
            logger.warning("refused %d more connections to the control channel", self._others)
        self._lines, self._others, self._until = LOG_LINES, 0, now + LOG_EVERY_S


def _listen(host: str) -> socket.socket:
    try:
        return socket.create_server((host, 0), backlog=BACKLOG)
    except OSError:  # the address that others know this machine by is not one of its own (NAT): listen on all
        return socket.create_server(("", 0), backlog=BACKLOG)
