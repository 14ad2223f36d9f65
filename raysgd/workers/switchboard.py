"""The driver's end of every line: who is there, what they say, who fell silent."""

from __future__ import annotations

import contextlib
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
from raysgd.workers.frames import FrameReader, probe, receive, send
from raysgd.workers.landing import Landing

__all__ = ["Switchboard"]

logger = logging.getLogger(__name__)

ENDED = "its process ended (the line to it was closed)"


class Switchboard:
    """Owns the listening socket and one thread. Turns what comes in into events; decides nothing.

    A line that ends is a `Gone` event within a millisecond of the process's death, usually before Ray tells. One
    whose other end does not even acknowledge bytes for `unreachable_s` ends too: that machine, or the way to it, is gone.
    """

    def __init__(self, events: queue.Queue[Event], host: str) -> None:
        self.token = secrets.token_hex(16)
        self.unreachable_s = 60.0
        self._events = events
        self._lines: dict[str, socket.socket] = {}
        self._names: dict[socket.socket, str] = {}
        self._heard_at: dict[str, float] = {}
        self._sending = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._listener = _listen(host)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="raysgd-switchboard", daemon=True)
        self._thread.start()

    def tell(self, worker: str, message: dict[str, Any]) -> bool:
        """Sends on a worker's line; False when there is none (its end is, or will be, a `Gone` event)."""
        line = self._lines.get(worker)
        if line is None:
            return False
        try:
            with self._sending:
                send(line, message)
        except OSError:
            return False
        return True

    def silent_for(self, worker: str) -> float:
        """Seconds since the worker's listener last said anything (it does so every second)."""
        heard = self._heard_at.get(worker)
        return 0.0 if heard is None else time.monotonic() - heard

    def hang_up(self, worker: str) -> None:
        """The worker is leaving on purpose: its end of line is no news."""
        line = self._lines.pop(worker, None)
        if line is not None:
            self._names.pop(line, None)
            with contextlib.suppress(OSError), self._sending:
                send(line, {"t": "bye"})

    def close(self) -> None:
        for worker in list(self._lines):
            self.hang_up(worker)
        self._closed = True
        with contextlib.suppress(OSError):
            socket.create_connection(self.address, timeout=1).close()  # wakes the selector
        self._thread.join(timeout=2)

    def _serve(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(timeout=1.0):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._read(key.fileobj, key.data)  # type: ignore[arg-type]
        for key in list(self._selector.get_map().values()):
            with contextlib.suppress(OSError):
                key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        probe(connection, self.unreachable_s)
        self._selector.register(connection, selectors.EVENT_READ, FrameReader(partial(self._admit, connection)))

    def _admit(self, connection: socket.socket, message: dict[str, Any]) -> None:
        """The first message on a connection has the token, or there is no second."""
        token = str(message.get("token", "")).encode()
        if connection not in self._names and not hmac.compare_digest(token, self.token.encode()):
            raise ValueError("it does not have this trainer's token")

    def _read(self, connection: socket.socket, reader: FrameReader) -> None:
        why = ENDED
        try:
            frames = receive(connection, reader)
        except TimeoutError:
            frames, why = None, f"its machine has not answered for {self.unreachable_s:g} s"
        except (ValueError, MemoryError) as error:
            logger.warning("refused a connection: %s", error)
            frames = None
        if frames is None:
            self._end(connection, why)
            return
        for message, body in frames:
            self._take(connection, message, body)

    def _take(self, connection: socket.socket, message: dict[str, Any], body: Landing) -> None:
        worker = self._names.get(connection)
        kind = message.get("t")
        if worker is None:
            if "token" not in message:
                return  # of a line that was hung up this very moment
            worker = str(message["worker"])
            if kind in ("upload", "message"):
                self._events.put(Heard(worker, message, body))
                return
            self._names[connection], self._lines[worker] = worker, connection
            self._events.put(Arrived(worker, message["node"], message["pid"]))
        elif kind != "alive":
            self._events.put(Heard(worker, message, body))
        self._heard_at[worker] = time.monotonic()

    def _end(self, connection: socket.socket, why: str = ENDED) -> None:
        self._selector.unregister(connection)
        connection.close()
        worker = self._names.pop(connection, None)
        if worker is not None and self._lines.pop(worker, None) is not None:
            self._events.put(Gone(worker, why, "worker death" if why == ENDED else "network"))


def _listen(host: str) -> socket.socket:
    try:
        return socket.create_server((host, 0))
    except OSError:  # the address that others know this machine by is not one of its own (NAT): listen on all
        return socket.create_server(("", 0))
