"""The worker's end of its line to the driver: heartbeats out, stop signs in. Runs beside the training thread."""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

from raysgd.constants import BATCH_COUNT, NUM_SAMPLES
from raysgd.metrics import COMMITTED, SKIPPED
from raysgd.progress import Control, Progress
from raysgd.workers.frames import ADMITTED, RECEIVED, FrameReader, packed, receive, send, send_body

__all__ = ["Line", "LineAddress", "brief"]

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
DRIVER_GONE = 78
DEEPEST = 100  # frames of a stack: an import alone can have dozens

CONNECT_S = 30.0
# For the driver to take a control message, or any few MB of a larger one: it may be suspended for a while.
SEND_S, BULK_S = 60.0, 600.0
# A greeting can be refused without this worker's fault, when the driver is flooded with connections.
TRIES_AGAIN_S = (0.1, 0.3, 1.0, 3.0)

# What a progress message carries of the metrics: text of this many characters, this many bytes in all.
LONGEST_TEXT, LONGEST_BRIEF, LARGEST_INT_BITS = 200, 64_000, 64


@dataclass(frozen=True)
class LineAddress:
    """Where the driver listens, and the word that lets a worker in."""

    host: str
    port: int
    token: str = field(repr=False)


class Line:
    """Owns one socket and one thread. Knows the control desk and how to abort a collective; nothing of training."""

    def __init__(
        self,
        address: LineAddress,
        worker: str,
        node: str,
        abort: Callable[[], None],
        dismissed: Callable[[], None] = lambda: None,
    ) -> None:
        self._address, self._worker = address, worker
        self._abort, self._dismissed = abort, dismissed
        self._sending = threading.Lock()
        self._socket = self._connect({"t": "hello", "node": node, "pid": os.getpid()})
        self._socket.settimeout(SEND_S)
        self._room = selectors.DefaultSelector()
        self._room.register(self._socket, selectors.EVENT_WRITE)
        self.control = Control(self._publish)
        self.on_end: Callable[[], None] = lambda: None
        self.generation = -1
        self.call = -1
        self._turning = threading.Lock()
        self._main = threading.main_thread().ident or 0
        self._open = True
        threading.Thread(target=self._listen, name="raysgd-line", daemon=True).start()

    def begin(self, call: int) -> None:
        """What was asked of an earlier call means nothing any more. What is asked of this one counts from here on: a
        stop may be agreed on before its work has begun."""
        with self._turning:
            self.control.withdraw()
            self.call = call

    def notice(self) -> None:
        """This worker was told that it will be stopped soon."""
        self.control.notice = True
        # Called from a signal handler on the training thread, which may hold the line's lock this very moment.
        threading.Thread(target=self._say, args=({"t": "notice"},), daemon=True).start()

    def upload(self, message: dict[str, Any], body: bytes | memoryview) -> None:
        """Sends bulk bytes on a connection of their own, so that stop signs never wait behind them."""
        self._send_alone({"t": "upload", **message, "partial": brief(message.get("partial"))}, body)

    def deliver(self, message: dict[str, Any], body: bytes | memoryview) -> None:
        """Like `upload`, for a message that must not be lost with this process."""
        self._send_alone({**message, "t": "message"}, body)

    def _send_alone(self, message: dict[str, Any], body: bytes | memoryview) -> None:
        """Send a message on a connection of its own. Return when the driver has the whole of it."""
        with self._connect(message, memoryview(body).nbytes) as connection:
            connection.settimeout(BULK_S)
            send_body(connection, body)
            if connection.recv(1) != RECEIVED:
                raise ConnectionError("the driver closed the connection before it had read the whole message")

    def _connect(self, message: Mapping[str, Any], size: int = 0) -> socket.socket:
        """Open a connection and greet: the token, then the header of the first message. Return when it is admitted."""
        host, port = self._address.host, self._address.port
        greeting = self._address.token.encode() + packed({**message, "worker": self._worker}, size)
        for pause_s in (*TRIES_AGAIN_S, None):
            connection = socket.create_connection((host, port), timeout=CONNECT_S)
            try:
                connection.settimeout(SEND_S)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection.sendall(greeting)
                if connection.recv(1) == ADMITTED:
                    return connection
            except ConnectionError as error:
                logger.debug("the driver at %s:%d broke off a greeting: %s", host, port, error)
            except BaseException:
                connection.close()
                raise
            connection.close()
            if pause_s is not None:
                time.sleep(pause_s)
        raise ConnectionRefusedError(
            f"the driver at {host}:{port} refused worker {self._worker} {len(TRIES_AGAIN_S) + 1} times: it is flooded with "
            "connections, or another process has that port now"
        )

    def _publish(self, progress: Progress, partial: dict[str, Any] | None) -> None:
        """Skipped while the driver does not read: a later message says the same, and training must not wait for it."""
        if self._room.select(0):
            self._say({"t": "progress", "call": self.call, "progress": astuple(progress), "partial": brief(partial)})

    def _say(self, message: dict[str, Any]) -> None:
        try:
            with self._sending:
                send(self._socket, message)
        except OSError:
            if self._open:
                self._driver_gone()

    def _listen(self) -> None:
        reader = FrameReader()
        incoming = selectors.DefaultSelector()
        incoming.register(self._socket, selectors.EVENT_READ)
        while self._open:
            if not incoming.select(HEARTBEAT_S):
                self._say({"t": "alive"})
                continue
            try:
                frames = receive(self._socket, reader)
            except TimeoutError:
                frames = None
            if frames is None:
                self._driver_gone()
                return
            for message, _ in frames:
                self._obey(message)

    def _obey(self, message: dict[str, Any]) -> None:
        kind = message["t"]
        if kind == "interrupt":
            if message["generation"] >= self.generation:
                self.control.interrupt()
                self._abort()
        elif kind == "propose":
            with self._turning:
                mine = message["call"] == self.call
                kept = mine and self.control.propose(message["at"])
                begun = self.control.begun if mine else -1
            self._say({"t": "consent", "id": message["id"], "kept": kept, "begun": begun})
        elif kind == "confirm":
            self.control.confirm()
        elif kind == "stack":
            self._say({"t": "stack", "id": message["id"], "frames": self._stack(), **self._where()})
        elif kind == "kill":
            self._kill(message["pid"])
        elif kind == "bye":
            self._open = False
            self.on_end()
            self._dismissed()

    def _stack(self) -> list[str]:
        """The training thread's frames, innermost first."""
        frame = sys._current_frames().get(self._main)
        return [f"{f.filename}:{f.lineno} {f.name}" for f in reversed(traceback.extract_stack(frame))][:DEEPEST]

    def _where(self) -> dict[str, Any]:
        return {"phase": self.control.phase, "batch": self.control.batch}

    @staticmethod
    def _kill(pid: int) -> None:
        """A worker on the same machine hangs: only a neighbour can end it at once."""
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            logger.info("process %d was gone already", pid)

    def _driver_gone(self) -> None:
        if self._open:
            self.on_end()
            os._exit(DRIVER_GONE)  # nobody is left to answer to, and the main thread may be stuck in a collective


def brief(result: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return what progress messages carry of a result: its counts, and numbers and short strings up to 64 kB in all.

    Everything else (long strings, tables, more metrics than that) reaches the driver with the call's own result.
    """
    if result is None:
        return None
    kept: dict[str, Any] = {}
    size = 0
    for name in dict.fromkeys(("epoch", BATCH_COUNT, NUM_SAMPLES, SKIPPED, COMMITTED, *result)):
        if name in result and isinstance(name, str) and _is_brief(name) and _is_brief(result[name]):
            size += len(json.dumps({name: result[name]}))
            if size > LONGEST_BRIEF:
                break
            kept[name] = result[name]
    return {name: kept[name] for name in result if name in kept}


def _is_brief(value: Any) -> bool:
    if isinstance(value, int):
        return value.bit_length() <= LARGEST_INT_BITS
    return isinstance(value, float) or (isinstance(value, str) and len(value) <= LONGEST_TEXT)
