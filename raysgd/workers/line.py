"""The worker's end of its line to the driver: heartbeats out, stop signs in. Runs beside the training thread."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

from raysgd.progress import Control, Progress
from raysgd.workers.frames import FrameReader, receive, send

__all__ = ["Line", "LineAddress"]

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
DRIVER_GONE = 78


@dataclass(frozen=True)
class LineAddress:
    """Where the driver listens, and the word that lets a worker in."""

    host: str
    port: int
    token: str


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
        self._socket = socket.create_connection((address.host, address.port), timeout=30)
        self._socket.settimeout(HEARTBEAT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.control = Control(self._publish)
        self.generation = -1
        self.call = -1
        self._turning = threading.Lock()
        self._main = threading.main_thread().ident or 0
        self._open = True
        self._say({"t": "hello", "token": address.token, "worker": worker, "node": node, "pid": os.getpid()})
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
        with socket.create_connection((self._address.host, self._address.port), timeout=30) as connection:
            connection.settimeout(None)
            send(connection, {"t": "upload", "token": self._address.token, "worker": self._worker, **message}, body)

    def deliver(self, message: dict[str, Any], body: bytes | memoryview) -> None:
        """Like `upload`, but returns when the driver has read it all: it closes the connection then. What was merely
        sent could still be lost with this process."""
        with socket.create_connection((self._address.host, self._address.port), timeout=30) as connection:
            connection.settimeout(None)
            head = {"t": "message", "token": self._address.token, "worker": self._worker}
            send(connection, {**message, **head}, body)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)

    def _publish(self, progress: Progress, partial: dict[str, Any] | None) -> None:
        told = partial and {name: value for name, value in partial.items() if _is_plain(name, value)}
        self._say({"t": "progress", "call": self.call, "progress": astuple(progress), "partial": told})

    def _say(self, message: dict[str, Any]) -> None:
        try:
            with self._sending:
                send(self._socket, message)
        except OSError:
            if self._open:
                self._driver_gone()

    def _listen(self) -> None:
        reader = FrameReader()
        while self._open:
            try:
                frames = receive(self._socket, reader)
            except TimeoutError:  # the heartbeat's clock
                self._say({"t": "alive"})
                continue
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
            self._dismissed()

    def _stack(self) -> list[str]:
        """The training thread's frames, innermost first."""
        frame = sys._current_frames().get(self._main)
        return [f"{f.filename}:{f.lineno} {f.name}" for f in reversed(traceback.extract_stack(frame))][:20]

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
            os._exit(DRIVER_GONE)  # nobody is left to answer to, and the main thread may be stuck in a collective


def _is_plain(name: Any, value: Any) -> bool:
    """What a header can say: other metrics (tables, images) reach the driver with the call's result."""
    return isinstance(name, str) and isinstance(value, (int, float, str))
