"""The worker's end of the control channel: sends heartbeats and progress, and obeys stop requests. Worker.

It is a thread with blocking sockets beside the training thread. asyncio would add nothing here: there is one connection
to read, and everything is sent by the threads that have something to send.
"""

from __future__ import annotations

import json
import logging
import numbers
import os
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from raysgd.constants import BATCH_COUNT, NUM_SAMPLES
from raysgd.core.connection import SEND_S, ControlAddress, connect, receive, receive_message, send
from raysgd.core.messages import (
    Alive,
    BoundaryAnswer,
    Bye,
    ConfirmBoundary,
    FunctionReport,
    Hello,
    Interrupt,
    KillProcess,
    Message,
    OpenBulk,
    PreemptionNotice,
    ProgressReport,
    ProposeBoundary,
    Received,
    SnapshotUpload,
    StackReport,
    StackRequest,
    StartDealer,
)
from raysgd.core.metrics import COMMITTED, SKIPPED
from raysgd.core.progress import Control, Progress

__all__ = ["ControlClient", "brief"]

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
DRIVER_GONE = 78
DEEPEST = 100  # frames of a stack: an import alone can have dozens

BULK_S = 600.0  # for the driver to take any few MB of a large message: it may be suspended for a while

# What a progress message carries of the metrics: text of this many characters, this many bytes in all.
LONGEST_TEXT, LONGEST_BRIEF, LARGEST_INT_BITS = 200, 64_000, 64


class ControlClient:
    """Owns the worker's control connection, one thread that reads it, and one bulk connection, which is opened when it is
    first needed. Knows the control desk and how to abort a collective, and nothing of training."""

    def __init__(
        self,
        address: ControlAddress,
        worker: str,
        node: str,
        abort: Callable[[], None],
        dismissed: Callable[[], None] = lambda: None,
    ) -> None:
        self._address, self._worker = address, worker
        self._abort, self._dismissed = abort, dismissed
        self._sending = threading.Lock()
        self._socket = connect(address, Hello(worker, node, os.getpid()))
        self._socket.settimeout(SEND_S)
        self._bulk: socket.socket | None = None
        self._bulk_free = threading.Lock()
        os.register_at_fork(after_in_child=self._forget_bulk)
        self._room = selectors.DefaultSelector()
        self._room.register(self._socket, selectors.EVENT_WRITE)
        self.control = Control(self._publish)
        self.on_end: Callable[[], None] = lambda: None
        self.generation = -1
        self.call = -1
        self._turning = threading.Lock()
        self._main = threading.main_thread().ident or 0
        self._open = True
        threading.Thread(target=self._listen, name="raysgd-control", daemon=True).start()

    def begin(self, call: int) -> None:
        """What was asked of an earlier call means nothing any more. What is asked of this one counts from here on: a
        stop may be agreed on before its work has begun."""
        with self._turning:
            self.control.withdraw()
            self.call = call

    def notice(self) -> None:
        """This worker was told that it will be stopped soon."""
        self.control.notice = True
        # Called from a signal handler on the training thread, which may hold the connection's lock this very moment.
        threading.Thread(target=self._send, args=(PreemptionNotice(),), daemon=True).start()

    def upload(self, message: SnapshotUpload, body: bytes | memoryview) -> None:
        """Send a snapshot over the bulk connection, so that stop requests never wait behind it."""
        self.deliver(replace(message, partial=brief(message.partial)), body)

    def deliver(self, message: SnapshotUpload | FunctionReport | StartDealer, body: bytes | memoryview) -> None:
        """Send a message that must not be lost with this process. Return when the driver has the whole of it."""
        with self._bulk_free:
            bulk, self._bulk = self._bulk, None  # kept only if all goes well: Ctrl-C may end this at any line
            if bulk is not None and not _is_idle(bulk):  # something between the machines has ended it meanwhile
                bulk.close()
                bulk = None
            if bulk is None:
                bulk = connect(self._address, OpenBulk(self._worker))
            try:
                bulk.settimeout(BULK_S)
                send(bulk, message, body)
                receive(bulk, Received)
            except BaseException:
                bulk.close()
                raise
            self._bulk = bulk

    def _forget_bulk(self) -> None:
        """In a forked process: the connection and its lock belong to the parent."""
        self._bulk, self._bulk_free = None, threading.Lock()

    def _publish(self, progress: Progress, partial: dict[str, Any] | None) -> None:
        """Skipped while the driver does not read: a later message says the same, and training must not wait for it."""
        if self._room.select(0):
            self._send(ProgressReport(self.call, progress, brief(partial)))

    def _send(self, message: Message) -> None:
        try:
            with self._sending:
                send(self._socket, message)
        except OSError:
            if self._open:
                self._driver_gone()

    def _listen(self) -> None:
        incoming = selectors.DefaultSelector()
        incoming.register(self._socket, selectors.EVENT_READ)
        while self._open:
            if not incoming.select(HEARTBEAT_S):
                self._send(Alive())
                continue
            try:
                message, _ = receive_message(self._socket)
            except (OSError, ValueError) as error:
                logger.info("the control connection to the driver has ended: %s", error)
                self._driver_gone()
                return
            try:
                self._obey(message)
            except Exception:  # without this thread the driver would take the worker for a stopped process
                logger.exception("%s could not be carried out", type(message).__name__)

    def _obey(self, message: Message) -> None:
        if isinstance(message, Interrupt):
            if message.generation >= self.generation:
                self.control.interrupt()
                self._abort()
        elif isinstance(message, ProposeBoundary):
            with self._turning:
                mine = message.call == self.call
                accepted = mine and self.control.propose(message.step)
                begun = self.control.begun if mine else -1
            self._send(BoundaryAnswer(message.round, accepted, begun))
        elif isinstance(message, ConfirmBoundary):
            self.control.confirm()
        elif isinstance(message, StackRequest):
            frames = tuple(self._stack())
            self._send(StackReport(message.round, frames, self.control.phase, self.control.batch))
        elif isinstance(message, KillProcess):
            self._kill(message.pid)
        elif isinstance(message, Bye):
            self._open = False
            self.on_end()
            self._dismissed()

    def _stack(self) -> list[str]:
        """The training thread's frames, innermost first."""
        frame = sys._current_frames().get(self._main)
        return [f"{f.filename}:{f.lineno} {f.name}" for f in reversed(traceback.extract_stack(frame))][:DEEPEST]

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


def _is_idle(connection: socket.socket) -> bool:
    """Return whether a connection on which nothing is expected is still open."""
    connection.setblocking(False)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError as error:
        logger.debug("the bulk connection is opened again: %s", error)
    return False


def brief(result: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return what progress messages carry of a result: its counts, and numbers and short strings up to 64 kB in all.

    Everything else (long strings, tables, more metrics than that) reaches the driver with the call's own result.
    """
    if result is None:
        return None
    kept: dict[str, Any] = {}
    size = 0
    for name in dict.fromkeys(("epoch", BATCH_COUNT, NUM_SAMPLES, SKIPPED, COMMITTED, *result)):
        value = _as_python(result.get(name))
        if isinstance(name, str) and _is_brief(name) and _is_brief(value):
            size += len(json.dumps({name: value}))
            if size > LONGEST_BRIEF:
                break
            kept[name] = value
    return {name: kept[name] for name in result if name in kept}


def _as_python(value: Any) -> Any:
    """Return Python's number for one of NumPy's."""
    is_numpys = type(value).__module__ == "numpy" and isinstance(value, numbers.Number)
    return value.item() if is_numpys else value


def _is_brief(value: Any) -> bool:
    if isinstance(value, int):
        return value.bit_length() <= LARGEST_INT_BITS
    return isinstance(value, float) or (isinstance(value, str) and len(value) <= LONGEST_TEXT)
