"""Serve the worker's end of the control channel: send heartbeats and progress, carry out stop
requests. Worker.

The client is a thread with blocking sockets beside the training thread. asyncio would add nothing,
because there is only one connection to read, and each thread sends its own messages."""

from __future__ import annotations

import contextlib
import logging
import numbers
import os
import queue
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from raysgd.constants import BATCH_COUNT, NUM_SAMPLES
from raysgd.core import messages
from raysgd.core.connection import SEND_S, Connection, ControlAddress, connect
from raysgd.core.hang import place_of
from raysgd.core.lease import LEASE_S, DriverWatch
from raysgd.core.metrics import SKIPPED, Measured
from raysgd.core.outcomes import Outcome
from raysgd.core.progress import Control, Progress
from raysgd.environment import CONTROL_PORT
from raysgd.workers.calls import packed_outcome
from raysgd.workers.transfer import Giving, ask, take

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
DRIVER_GONE = 78
CANNOT_CONNECT = "cannot connect to the script's machine"
DEEPEST = 100  # frames of a stack, of which an import alone can have dozens

LOOK_S = 0.5
BULK_S = 600.0  # for the driver to take any few MB of a large message: it may be suspended for a while

# Limits on the metrics in a progress message: characters of one text, of all metrics, bits of one integer.
LONGEST_TEXT, LONGEST_BRIEF, LARGEST_INT_BITS = 200, 64_000, 64


class ControlClient:
    """Owns the worker's control connection, the thread that reads it, the `Control` of the training
    thread, and a bulk connection once it is needed. Knows how to abort a collective."""

    waited_on: socket.socket | None = None  # by the main thread, for the driver

    def __init__(
        self,
        address: ControlAddress,
        worker: str,
        node: str,
        abort: Callable[[], None],
        dismissed: Callable[[], None] = lambda: None,
        *,
        orphan_s: float = 0.0,
        gpus: Sequence[str] = (),
    ) -> None:
        self._worker, self._node, self._orphan_s, self._gpus = worker, node, orphan_s, tuple(gpus)
        self._abort, self._dismissed = abort, dismissed
        self._send_lock, self._call_lock = threading.Lock(), threading.Lock()
        self._bulk: Connection | None = None
        self._bulk_lock = threading.Lock()
        os.register_at_fork(after_in_child=self._forget_connections)
        self.control = Control(self._publish)
        self.control.outlives_driver = bool(orphan_s)
        self.control.upload, self.control.deliver = self.upload, self.deliver
        self.on_end: Callable[[], None] = lambda: None
        self.holds_state: Callable[[], bool] = lambda: False
        self.on_driver_ended: Callable[[], None] = lambda: None
        self.generation = -1
        self._main = threading.main_thread().ident or 0
        self._open, self._forked = True, False
        self.connect(address)

    def connect(self, address: ControlAddress) -> None:
        """Connect to the driver, and leave the one before. For the main thread, between two
        calls."""
        # After so long without an answer, another driver may take over, which waits for this.
        answer_s = LEASE_S if self._orphan_s else SEND_S
        connection = _connected(address, messages.Hello(self._worker, self._node, os.getpid(), self._gpus), answer_s)
        writable = selectors.DefaultSelector()
        writable.register(connection.socket, selectors.EVENT_WRITE)
        with self._send_lock, self._bulk_lock:
            before, bulk, self._bulk = getattr(self, "_connection", None), self._bulk, None
            self._address, self._connection, self._writable = address, connection, writable
            self.watch, self.call = DriverWatch(self._orphan_s, time.monotonic()), -1
            # What the driver asks the main thread to do.
            self.calls: queue.SimpleQueue[messages.PerformCall | None] = queue.SimpleQueue()  # None: wait for no more
        self.control.giving = partial(Giving, address, self._worker, waiting=self._waiting)
        self.control.take = partial(take, address, self._worker, waiting=self._waiting)
        self.control.ask = partial(ask, address, self._worker, waiting=self._waiting)
        for each in (before, bulk):
            if each is not None:
                each.close()
        listening = connection, self.watch, self.calls
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
        packed, large = packed_outcome(outcome)
        answer = messages.CallAnswer(call, packed, tuple(map(len, large)))
        if large:
            self._deliver(answer, *large)
        else:
            self._send(answer)

    def notice(self) -> None:
        """Report that this worker will be stopped soon."""
        self.control.notice = True
        # A signal handler on the training thread calls this, and that thread may hold the connection's lock right now.
        threading.Thread(target=self._send, args=(messages.PreemptionNotice(),), daemon=True).start()

    def upload(self, message: messages.SnapshotUpload, *body: bytes | memoryview) -> None:
        """Send a snapshot over the bulk connection, so that stop requests never wait behind it."""
        self._deliver(replace(message, partial=_briefly(message.partial)), *body)

    def deliver(self, message: messages.FunctionReport | messages.StartDealer, body: bytes) -> None:
        """Send a message that must not be lost with this process. Return when the driver has
        acknowledged it, or when the generation has ended."""
        self._deliver(message, body)

    def _deliver(self, message: messages.Message, *body: bytes | memoryview) -> None:
        with self._bulk_lock:  # but not while this waits: other threads then use another connection
            bulk, self._bulk = self._bulk, None  # stored again at the end, because Ctrl-C may end this at any line
        if bulk is not None and not _is_idle(bulk.socket):  # a device between the machines has closed it meanwhile
            bulk.close()
            bulk = None
        if bulk is None:
            bulk = connect(self._address, messages.Open(self._worker), waiting=self._waiting)
        try:
            with self._waiting(bulk.socket):
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

    @contextlib.contextmanager
    def _waiting(self, connection: socket.socket) -> Iterator[None]:
        """Return a context in which a connection of the main thread ends when the driver does not
        answer, as that thread is what another driver needs. A save in the background, on a thread
        of its own, may still get an answer."""
        if threading.get_ident() != self._main:
            yield
            return
        self.waited_on = connection  # first, because `look` sets `since` first
        try:
            if self.watch.since is not None:
                raise TimeoutError("the driver has ended, or does not answer")
            yield
        finally:
            self.waited_on = None

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
            self._send(messages.ProgressReport(self.call, progress, _briefly(partial)))

    def _send(self, message: messages.Message) -> None:
        if self._forked:
            return
        try:
            with self._send_lock:
                self._connection.send(message)
        except OSError:
            with contextlib.suppress(OSError):  # the control thread notices the end of it
                self._connection.socket.shutdown(socket.SHUT_RDWR)

    def _listen(self, connection: Connection, watch: DriverWatch, calls: queue.SimpleQueue[Any]) -> None:
        incoming = selectors.DefaultSelector()
        incoming.register(connection.socket, selectors.EVENT_READ)
        while self._open and self.watch is watch:
            self.look(watch)
            if watch.has_ended:
                time.sleep(LOOK_S)
                continue
            if not incoming.select(HEARTBEAT_S):
                self._send(messages.Alive())
                continue
            try:
                message, _ = connection.receive()
            except Exception as error:
                logger.info("the control connection to the driver has ended: %s", error)
                if self._open and self.watch is watch:
                    self.on_driver_ended()
                watch.has_ended = True
                calls.put(None)  # also if it has ended the wait when the driver did not answer
                continue
            watch.heard(time.monotonic())
            try:
                self._handle(message)
            except Exception:  # without this thread, the driver would treat the process as stopped
                logger.exception("%s could not be carried out", type(message).__name__)

    def _handle(self, message: messages.Message) -> None:
        if isinstance(message, messages.PerformCall):
            self.calls.put(message)
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
            frames = tuple(self._stack())
            control = self.control
            place = place_of(frames, control.collectives(), control.begun_after, control.called())
            self._send(messages.StackReport(message.round, frames, control.phase, control.batch, place))
        elif isinstance(message, messages.KillProcess):
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(message.pid, signal.SIGKILL)
        elif isinstance(message, messages.Bye):
            self._open = False
            self.on_end()
            self._dismissed()

    def _stack(self) -> list[str]:
        frame = sys._current_frames().get(self._main)
        return [f"{f.filename}:{f.lineno} {f.name}" for f in reversed(traceback.extract_stack(frame))][:DEEPEST]

    def look(self, watch: DriverWatch) -> None:
        """Do what is due for a worker whose driver has ended, or does not answer."""
        due = watch.look(self._clock(), holds_state=self.holds_state())
        if self.watch is not watch:
            return
        if due == "stop":
            self.control.interrupt()
            if (connection := self.waited_on) is not None:
                with contextlib.suppress(OSError):  # it has ended
                    connection.shutdown(socket.SHUT_RDWR)
            self.calls.put(None)
        elif due == "leave":
            self._abort()
        elif due == "end":
            self._end()

    def _clock(self) -> float:
        return time.monotonic()

    def _end(self) -> None:
        self.on_end()
        os._exit(DRIVER_GONE)  # the main thread may be stuck in a collective


def _connected(address: ControlAddress, hello: messages.Hello, answer_s: float) -> Connection:
    """Return the control connection. An error says which machine cannot be reached."""
    try:
        return connect(address, hello, answer_s=answer_s)
    except ConnectionAbortedError:  # the driver was reached
        raise
    except OSError as error:
        raise ConnectionError(  # in one line, because Ray passes on only the text
            f"{socket.gethostname()} {CANNOT_CONNECT} at {address.host}:{address.port} ({error}): a firewall? The environment "
            f"variable {CONTROL_PORT} of the script chooses that port, or a range"
        ) from error


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


def _briefly(measured: Measured | None) -> Measured | None:
    return None if measured is None else replace(measured, metrics=brief(measured.metrics))


def brief(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a result that progress messages contain: its counts, and numbers and short
    strings, 64,000 characters at most.

    Everything else (long strings, tables, more metrics than that) reaches the driver with the
    call's result.
    """
    kept: dict[str, Any] = {}
    size = 0
    for name in dict.fromkeys(("epoch", BATCH_COUNT, NUM_SAMPLES, SKIPPED, *result)):
        value = _plain(result.get(name))
        if value is not None and isinstance(name, str) and len(name) <= LONGEST_TEXT:
            size += len(name) + len(repr(value))
            if size > LONGEST_BRIEF:
                break
            kept[name] = value
    return {str.__str__(name): kept[name] for name in result if name in kept}


def _plain(value: Any) -> Any:
    """Return a number or a short string as Python's own, which needs no import, or None."""
    if type(value).__module__ == "numpy" and isinstance(value, numbers.Real):
        value = value.item()  # type: ignore[attr-defined]
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if value.bit_length() <= LARGEST_INT_BITS else None
    if isinstance(value, float):
        return float(value)
    return str.__str__(value) if isinstance(value, str) and len(value) <= LONGEST_TEXT else None
