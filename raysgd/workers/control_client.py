"""Serve the worker's end of the control channel: send heartbeats and progress, carry out stop
requests. Worker.

The client is a thread with blocking sockets beside the training thread. asyncio would add nothing,
because there is only one connection to read, and each thread sends its own messages."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from raysgd.core.channel import messages
from raysgd.core.channel.connection import SEND_S, Connection, ControlAddress, connect
from raysgd.core.control import Control
from raysgd.core.decisions.lease import LEASE_S
from raysgd.core.measures.metrics import Measured, briefly
from raysgd.core.measures.progress import Progress
from raysgd.core.outcomes import Outcome
from raysgd.environment import CONTROL_PORT
from raysgd.workers.calls import pack_outcome
from raysgd.workers.orphan import DriverContact
from raysgd.workers.transfer import Giving, ask, take

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
MOVED_EVERY_S = 1.0
CANNOT_CONNECT = "cannot connect to the script's machine"
DEEPEST = 100  # frames of a stack, of which an import alone can have dozens

LOOK_S = 0.5
BULK_S = 600.0  # for the driver to take any few MB of a large message: it may be suspended for a while


class ControlClient:
    """Owns the worker's control connection, the thread that reads it, the `Control` of the training
    thread, and a bulk connection once it is needed.

    abort      ends a collective call, and leaves the process group
    dismissed  ends the process, which the driver needs no longer
    orphaned   ends the process, to which no other driver has come
    """

    driver: DriverContact

    def __init__(
        self,
        address: ControlAddress,
        worker: str,
        node: str,
        abort: Callable[[], None],
        dismissed: Callable[[], None] = lambda: None,
        orphaned: Callable[[], None] = lambda: None,
        *,
        orphan_s: float = 0.0,
        gpus: Sequence[str] = (),
    ) -> None:
        self._worker, self._node, self._orphan_s, self._gpus = worker, node, orphan_s, tuple(gpus)
        self._abort, self._dismissed, self._orphaned = abort, dismissed, orphaned
        self._send_lock, self._call_lock = threading.Lock(), threading.Lock()
        self._bulk: Connection | None = None
        self._bulk_lock = threading.Lock()
        os.register_at_fork(after_in_child=self._forget_connections)
        self.control = Control(self._publish)
        self.control.upload, self.control.deliver, self.control.moved = self.upload, self.deliver, self._say_moved
        self.holds_state: Callable[[], bool] = lambda: False
        self.on_driver_ended: Callable[[], None] = lambda: None
        self.generation, self._moved_at = -1, 0.0
        self._open, self._forked = True, False
        self.connect(address)

    def connect(self, address: ControlAddress) -> None:
        """Connect to the driver, and leave the one before. For the main thread, between two
        calls."""
        # After so long without an answer, another driver may take over, which waits for this.
        answer_s = LEASE_S if self._orphan_s else SEND_S
        connection = _open_connection(
            address, messages.Hello(self._worker, self._node, os.getpid(), self._gpus), answer_s
        )
        writable = selectors.DefaultSelector()
        writable.register(connection.socket, selectors.EVENT_WRITE)
        with self._send_lock, self._bulk_lock:
            before, bulk, self._bulk = getattr(self, "_connection", None), self._bulk, None
            self._address, self._connection, self._writable = address, connection, writable
            if before is not None:
                self.driver.is_over = True
            ways = {"stop": self.control.interrupt, "leave": self._abort, "end": self._orphaned}
            self.driver = DriverContact(self._orphan_s, time.monotonic(), **ways)
            self.call = -1
        self.control.giving = partial(Giving, address, self._worker, waiting=self.driver.waiting)
        self.control.take = partial(take, address, self._worker, waiting=self.driver.waiting)
        self.control.ask = partial(ask, address, self._worker, waiting=self.driver.waiting)
        for each in (before, bulk):
            if each is not None:
                each.close()
        listening = connection, self.driver
        threading.Thread(target=self._listen, args=listening, name="raysgd-control", daemon=True).start()
        if self.control.notice:
            self.notice()

    def begin(self, call: int) -> None:
        """Begin a call. Requests for earlier calls no longer apply. Requests for this one apply
        from now on, because all ranks may agree on a boundary before its work has begun."""
        with self._call_lock:
            self.control.withdraw()
            self.call = call

    def answer(self, call: int, outcome: Outcome) -> None:
        packed, large = pack_outcome(outcome)
        answer = messages.CallAnswer(call, packed, tuple(map(len, large)))
        if large:
            self.deliver(answer, *large)
        else:
            self._send(answer)

    def notice(self) -> None:
        """Report that this worker will be stopped soon."""
        self.control.notice = True
        # A signal handler on the training thread calls this, and that thread may hold the connection's lock right now.
        threading.Thread(target=self._send, args=(messages.PreemptionNotice(),), daemon=True).start()

    def upload(self, message: messages.SnapshotUpload, *body: bytes | memoryview) -> None:
        """Send a snapshot over the bulk connection, so that stop requests never wait behind it."""
        self.deliver(replace(message, partial=briefly(message.partial)), *body)

    def deliver(self, message: messages.Message, *body: bytes | memoryview) -> None:
        """Send a message that must not be lost with this process. Return when the driver has
        acknowledged it, or, for a report, when the generation has ended."""
        with self._bulk_lock:  # but not while this waits: other threads then use another connection
            bulk, self._bulk = self._bulk, None  # stored again at the end, because Ctrl-C may end this at any line
        if bulk is not None and not _is_idle(bulk.socket):  # a device between the machines has closed it meanwhile
            bulk.close()
            bulk = None
        if bulk is None:
            bulk = connect(self._address, messages.Open(self._worker), waiting=self.driver.waiting)
        try:
            with self.driver.waiting(bulk.socket):
                bulk.socket.settimeout(BULK_S)
                bulk.send(message, *body)
                if isinstance(message, messages.FunctionReport) and not self._is_answered(bulk.socket):
                    bulk.close()
                    return
                bulk.expect(messages.Received)
        except BaseException:
            bulk.close()
            raise
        with self._bulk_lock:
            bulk, self._bulk = self._bulk, bulk
        if bulk is not None:
            bulk.close()

    def _is_answered(self, bulk: socket.socket) -> bool:
        """Wait for the driver's answer to a report. Return False if the generation ends first."""
        bulk.settimeout(LOOK_S)
        while not self.control.interrupted:
            with contextlib.suppress(TimeoutError):
                bulk.recv(1, socket.MSG_PEEK)
                bulk.settimeout(BULK_S)
                return True
        return False

    def _forget_connections(self) -> None:
        """Drop the parent's connections and locks in a forked process, as what both send would be
        mixed. It reports over a bulk connection of its own."""
        self._bulk, self._bulk_lock = None, threading.Lock()
        self._send_lock, self._forked = threading.Lock(), True

    def _publish(self, progress: Progress, partial: Measured | None) -> None:
        """Send progress, unless the driver does not read at the moment: training must not wait for
        it, and a later message will replace this one."""
        if self._writable.select(0):
            self._send(messages.ProgressReport(self.call, progress, briefly(partial)))

    def _say_moved(self) -> None:
        """Say that a part of a state has moved, unless that was said a moment ago."""
        if (now := time.monotonic()) - self._moved_at >= MOVED_EVERY_S:
            self._moved_at = now
            self._send(messages.Moved())

    def _send(self, message: messages.Message) -> None:
        if self._forked:
            return
        try:
            with self._send_lock:
                self._connection.send(message)
        except OSError:
            with contextlib.suppress(OSError):  # the control thread notices the end of it
                self._connection.socket.shutdown(socket.SHUT_RDWR)

    def _listen(self, connection: Connection, driver: DriverContact) -> None:
        incoming = selectors.DefaultSelector()
        incoming.register(connection.socket, selectors.EVENT_READ)
        while self._open and not driver.is_over:
            driver.look(time.monotonic(), holds_state=self.holds_state())
            if driver.has_ended:
                time.sleep(LOOK_S)
                continue
            if not incoming.select(HEARTBEAT_S):
                self._send(messages.Alive())
                continue
            try:
                message, _ = connection.receive()
            except Exception as error:
                logger.info("the control connection to the driver has ended: %s", error)
                if self._open and not driver.is_over:
                    self.on_driver_ended()
                driver.note_end()
                continue
            driver.note_message(time.monotonic())
            try:
                self._handle(message)
            except Exception:  # without this thread, the driver would treat the process as stopped
                logger.exception("%s could not be carried out", type(message).__name__)

    def _handle(self, message: messages.Message) -> None:
        if isinstance(message, messages.PerformCall):
            self.driver.calls.put(message)
        elif isinstance(message, messages.Interrupt):
            if message.generation >= self.generation:
                self.control.interrupt()
                self._abort()
        elif isinstance(message, messages.ProposeBoundary):
            with self._call_lock:
                current = message.call == self.call
                accepted = current and self.control.propose(message.step)
                begun = self.control.begun if current else -1
            self._send(messages.BoundaryAnswer(message.round, accepted, begun))
        elif isinstance(message, messages.ConfirmBoundary):
            self.control.confirm()
        elif isinstance(message, messages.StackRequest):
            frames, control = tuple(self._stack()), self.control
            self._send(messages.StackReport(message.round, frames, control.phase, control.batch))
        elif isinstance(message, messages.KillProcess):
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(message.pid, signal.SIGKILL)
        elif isinstance(message, messages.Bye):
            self._open = False
            self._dismissed()

    def _stack(self) -> list[str]:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        return [f"{f.filename}:{f.lineno} {f.name}" for f in reversed(traceback.extract_stack(frame))][:DEEPEST]


def _open_connection(address: ControlAddress, hello: messages.Hello, answer_s: float) -> Connection:
    """Open the control connection. An error says which machine cannot be reached."""
    try:
        return connect(address, hello, answer_s=answer_s)
    except ConnectionAbortedError:  # the driver was reached
        raise
    except OSError as error:
        raise ConnectionError(  # in one line, because Ray passes on only the text
            f"{socket.gethostname()} {CANNOT_CONNECT} at {address.host}:{address.port} ({error}): a firewall? The environment "
            f"variable {CONTROL_PORT} of the script chooses that port, or a range, and GLOO_SOCKET_IFNAME its interface"
        ) from error


def _is_idle(connection: socket.socket) -> bool:
    """Whether a connection on which nothing is expected is still open."""
    connection.setblocking(False)
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError as error:
        logger.debug("the bulk connection is opened again: %s", error)
    return False
