"""Serve the driver's end of the control channel: admit workers, and turn what they send into events. Driver."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from raysgd.config import control_ports
from raysgd.core.connection import (
    PREFIX,
    TOKEN_BYTES,
    ControlAddress,
    as_timeout,
    detect_unreachable,
    framed,
    receive_body,
    receive_message,
    send,
    send_now,
    sizes,
)
from raysgd.core.messages import (
    Admitted,
    Alive,
    Bye,
    CallAnswer,
    FunctionReport,
    Hello,
    Message,
    OpenBulk,
    OpenTransfer,
    Received,
    Rejected,
    SnapshotUpload,
    StartDealer,
    decode,
    encode,
)
from raysgd.core.network import listen
from raysgd.workers.events import Event, MessageReceived, PartReceived, WorkerEnded, WorkerStarted

__all__ = ["ControlServer"]

logger = logging.getLogger(__name__)

ENDED = "its process ended (its control connection was closed)"

# Clients without the token can hold at most this many connections (or two for each worker that is expected, because all
# workers may connect at once), each for this long, and the server reads no more than a token from each. A worker sends
# its first message at once.
ADMISSION_S = 5.0
UNADMITTED_AT_MOST = 128

ACCEPT_PAUSE_S = 1.0
CLOSE_S = 2.0
PART_EVERY_S = 1.0
NO_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
LOG_LINES, LOG_EVERY_S = 5, 30.0
RECEIVED_AT_ONCE = 1 << 16
SEND_BUFFER = 1 << 18  # for several calls, because nothing waits for a worker to read them
LARGEST_ANSWER = 1 << 18
ALIVE, BYE = framed(Alive()), framed(Bye())
ANSWER = CallAnswer()
ANSWER_HEADER = encode(ANSWER)


class _Peer:
    """One connection in the control thread: not admitted yet, or the control connection of `worker`."""

    def __init__(self, connection: socket.socket, address: Any) -> None:
        self.connection = connection
        self.address = f"{address[0]}:{address[1]}"
        self.worker: str | None = None
        self.received = bytearray()  # the beginning of a message that is not complete
        self.task: asyncio.Task[None] | None = None
        self.deadline: asyncio.TimerHandle | None = None
        self.refused = ""  # why the control thread closes it
        self.broken = ""  # why another thread has shut it down


class ControlServer:
    """Owns the listening socket, all connections of workers, and the control thread. Turns what workers send into
    events, and decides nothing.

    The control thread runs an asyncio loop: it authenticates every connection, and reads the control connections. A
    bulk connection gets a thread of its own once it is admitted, and a checkpoint's connection goes to its receiver, so
    that no transfer delays a heartbeat.

    When a process ends, so does its control connection, which is a `WorkerEnded` event within milliseconds, usually
    before Ray reports the end. A connection also ends if the other machine acknowledges nothing for `unreachable_s`.
    Whatever one connection sends, an error ends only that connection."""

    def __init__(self, events: queue.SimpleQueue[Event], host: str, *, node: str = "") -> None:
        """`node` is the name of this machine's node, as workers on it give it."""
        self._node = node
        self.token = secrets.token_hex(TOKEN_BYTES // 2)
        self.unreachable_s = 60.0
        self.expected_workers = 0
        self._events = events
        self._workers: dict[str, _Peer] = {}
        self._unadmitted: dict[_Peer, None] = {}  # the oldest first
        self._handed_over: set[socket.socket] = set()
        self._expected: dict[str, Callable[[socket.socket], None]] = {}
        # Reentrant, like the next one: a signal handler may run while the main thread holds it.
        self._expecting = threading.RLock()
        self._received_at: dict[str, float] = {}  # when each worker last sent something
        self._sending = threading.RLock()
        self._framed: tuple[Message | None, int, bytes] = None, 0, b""  # the newest one, which is usually sent to many
        self._refusals = _Refusals()
        self._listener = _listen(host, control_ports())
        self._listener.setblocking(False)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._short_of_resources = False  # logged once, until connections can be accepted again
        self._loop = asyncio.SelectorEventLoop()  # even if the user has set another event loop policy
        self._loop.set_exception_handler(_log_unexpected)
        self._thread = threading.Thread(target=self._run, name="raysgd-control", daemon=True)
        self._thread.start()

    def address_for_workers(self) -> ControlAddress:
        """Return what a worker needs to connect."""
        return ControlAddress(*self.address, self.token, self.unreachable_s)

    # -- any thread -----------------------------------------------------------------------------------

    def send(self, worker: str, message: Message, body: bytes = b"") -> bool:
        """Send a message to a worker without blocking. Return False if it has no connection, which is or will be
        reported as a `WorkerEnded` event."""
        peer = self._workers.get(worker)
        if peer is None:
            return False
        try:
            with self._sending:
                newest = self._framed  # a signal handler that sends another message may replace it at any line
                if newest[0] is not message or newest[1] != len(body):
                    newest = self._framed = message, len(body), framed(message, len(body))
                send_now(peer.connection, newest[2] + body)
        except BlockingIOError:
            peer.broken = "it has not read any message for a long time"
            with contextlib.suppress(OSError):
                peer.connection.shutdown(socket.SHUT_RDWR)  # the control thread sees the end, and reports it
            return False
        except OSError:
            return False
        return True

    def silent_for(self, worker: str) -> float:
        """Return the seconds since the worker last sent anything (it does so every second)."""
        at = self._received_at.get(worker)
        return 0.0 if at is None else time.monotonic() - at

    def disconnect(self, worker: str) -> None:
        """Forget a worker that is no longer needed, so that the end of its connection is not an event."""
        peer = self._workers.pop(worker, None)
        self._received_at.pop(worker, None)
        if peer is not None:
            with contextlib.suppress(OSError), self._sending:
                send_now(peer.connection, BYE)

    def expect_transfer(self, take: Callable[[socket.socket], None]) -> str:
        """Return the name of a new transfer. The control thread calls `take` with every connection that names it. `take`
        owns the connection, which is in blocking mode, but must not block itself."""
        name = secrets.token_hex(TOKEN_BYTES // 2)
        with self._expecting:
            self._expected[name] = take
        return name

    def end_transfer(self, name: str) -> None:
        """Expect no more connections for this transfer: workers receive `Rejected`. `take` is not called after this."""
        with self._expecting:
            self._expected.pop(name, None)

    def close(self) -> None:
        for worker in list(self._workers):
            self.disconnect(worker)
        with contextlib.suppress(RuntimeError):  # it was closed before
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=CLOSE_S)

    # -- the control thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.add_reader(self._listener, self._accept)
        self._summarize()
        self._loop.run_forever()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self._loop.run_until_complete(self._cancel_all())
        for connection in list(self._handed_over):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # its thread closes it
        self._loop.close()

    async def _cancel_all(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _summarize(self) -> None:
        self._refusals.summarize()
        self._loop.call_later(1.0, self._summarize)

    def _accept(self) -> None:
        """Accept one connection. The loop serves all others before it accepts the next one, so that a worker that has
        sent its first message is admitted before newer connections take its place."""
        try:
            connection, address = self._listener.accept()
        except OSError as error:
            if error.errno in NO_RESOURCES:
                self._pause_accepting(error)
            return
        self._short_of_resources = False
        peer = _Peer(connection, address)
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
            detect_unreachable(connection, self.unreachable_s)
        except OSError as error:  # it has ended already
            connection.close()
            self._refusals.add(peer.address, str(error))
            return
        self._unadmitted[peer] = None
        late = f"it was not admitted within {ADMISSION_S:g} s: its token or its first message was not complete"
        peer.deadline = self._loop.call_later(ADMISSION_S, self._refuse, peer, late)
        peer.task = self._loop.create_task(self._serve(peer))
        most = max(UNADMITTED_AT_MOST, 2 * self.expected_workers)
        if len(self._unadmitted) > most:
            oldest = next(iter(self._unadmitted))
            self._refuse(oldest, f"more than {most} connections were waiting to be admitted")

    def _pause_accepting(self, error: OSError) -> None:
        """Stop accepting connections for a while. The waiting connection stays in the kernel's queue, so the listener
        would be ready again at once."""
        if not self._short_of_resources:
            logger.warning("cannot accept connections of workers (%s): trying again every %g s", error, ACCEPT_PAUSE_S)
        self._short_of_resources = True
        self._loop.remove_reader(self._listener)
        self._loop.call_later(ACCEPT_PAUSE_S, self._loop.add_reader, self._listener, self._accept)

    def _refuse(self, peer: _Peer, why: str) -> None:
        """Close a connection that is not admitted yet, for this reason."""
        self._unadmitted.pop(peer, None)
        peer.refused = why
        if peer.task is not None:
            peer.task.cancel()

    async def _serve(self, peer: _Peer) -> None:
        """Read a connection until it ends, or until it is handed over."""
        why, reason = ENDED, "worker death"
        try:
            first = await self._first_message(peer)
            if not isinstance(first, Hello):
                self._hand_over(peer, first)
                return
            await self._read_control(peer, first)
        except asyncio.CancelledError:
            why = peer.refused
        except TimeoutError:
            why, reason = f"its machine has not answered for {self.unreachable_s:g} s", "network"
        except OSError as error:  # also the orderly end
            logger.debug("the connection from %s has ended: %s", peer.address, error)
            if peer.broken:
                why, reason = peer.broken, "network"
        except Exception as error:  # whatever one connection sends, the others are served
            peer.refused = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            why, reason = f"its control connection was closed: {peer.refused}", "network"
        self._end(peer)
        worker = peer.worker
        # `disconnect` may be faster, also between these two steps.
        if worker is not None and self._workers.get(worker) is peer and self._workers.pop(worker, None) is not None:
            self._events.put(WorkerEnded(worker, why, reason))
        if peer.refused:  # last, as the user's log handlers may be slow, or raise
            self._refusals.add(peer.address, peer.refused)

    def _end(self, peer: _Peer) -> None:
        self._handed_over.discard(peer.connection)
        peer.connection.close()
        self._forget_unadmitted(peer)

    def _forget_unadmitted(self, peer: _Peer) -> None:
        self._unadmitted.pop(peer, None)
        if peer.deadline is not None:
            peer.deadline.cancel()

    async def _first_message(self, peer: _Peer) -> Message:
        """Admit the connection, and return its first message. Nothing behind the token is read before the token is
        complete and verified."""
        token = await self._exactly(peer, TOKEN_BYTES)
        if not hmac.compare_digest(token, self.token.encode()):
            raise ValueError("it does not have this trainer's token")
        message = await self._message(peer)
        if not isinstance(message, Hello | OpenBulk | OpenTransfer):
            raise ValueError(f"its first message is {type(message).__name__}")
        if isinstance(message, Hello) and message.worker in self._workers:
            raise ValueError(f"worker {message.worker} is connected already")
        self._forget_unadmitted(peer)
        return message

    async def _read_control(self, peer: _Peer, hello: Hello) -> None:
        worker = hello.worker
        peer.connection.send(framed(Admitted()))
        peer.worker = worker
        self._received_at[worker] = time.monotonic()
        self._workers[worker] = peer
        address = peer.address.rpartition(":")[0]
        self._events.put(WorkerStarted(worker, hello.node, hello.pid, address, local=hello.node == self._node))
        ended: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(peer.connection, self._read, peer, worker, ended)
        try:
            await ended
        finally:
            self._loop.remove_reader(peer.connection)

    def _read(self, peer: _Peer, worker: str, ended: asyncio.Future[None]) -> None:
        """Take what has arrived on a control connection. The loop calls this directly, once for each connection before
        any again, because a coroutine that waits for each message would cost several times as much."""
        try:
            data = peer.connection.recv(RECEIVED_AT_ONCE)
            if not data:
                raise ConnectionError("it was closed")
            if self._workers.get(worker) is peer:  # otherwise, `disconnect` was called
                self._received_at[worker] = time.monotonic()
            if peer.received or data != ALIVE:
                peer.received += data
                self._take(peer, worker)
        except BlockingIOError:
            return
        except Exception as error:
            if not ended.done():
                ended.set_exception(as_timeout(error) if isinstance(error, OSError) else error)

    def _take(self, peer: _Peer, worker: str) -> None:
        """Turn the complete messages that have arrived into events."""
        start, data = 0, peer.received
        while len(data) - start >= PREFIX.size:
            header, size = sizes(data[start : start + PREFIX.size])
            if size > LARGEST_ANSWER:
                raise ValueError(f"not a raysgd control message: it has a body of {size} bytes on a control connection")
            begin = start + PREFIX.size
            end = begin + header + size
            if len(data) < end:
                break
            body = bytes(data[begin + header : end])
            if data[begin : begin + header] == ANSWER_HEADER:
                message: Message = ANSWER
            else:
                message = decode(data[begin : begin + header])
                if body:
                    raise ValueError(f"not a raysgd control message: {type(message).__name__} has a body")
            start = end
            if self._workers.get(worker) is peer and not isinstance(message, Alive):
                self._events.put(MessageReceived(worker, message, body))
        del data[:start]

    async def _message(self, peer: _Peer) -> Message:
        return decode(await self._exactly(peer, self._header_size(await self._exactly(peer, PREFIX.size))))

    @staticmethod
    def _header_size(prefix: bytes | bytearray) -> int:
        header, body = sizes(prefix)
        if body:
            raise ValueError(f"not a raysgd control message: it has a body of {body} bytes on a control connection")
        return header

    async def _exactly(self, peer: _Peer, size: int) -> bytes:
        """Return the next `size` bytes. (asyncio's StreamReader would read ahead: past the token, and into what follows
        the first message of a connection that is handed over.)"""
        data = bytearray()
        while len(data) < size:
            try:
                received = await self._loop.sock_recv(peer.connection, size - len(data))
            except OSError as error:
                raise as_timeout(error) from None
            if not received:
                raise ConnectionError("it was closed")
            data += received
        return bytes(data)

    # -- other connections ----------------------------------------------------------------------------

    def _hand_over(self, peer: _Peer, first: Message) -> None:
        connection = peer.connection
        if isinstance(first, OpenBulk):
            connection.send(framed(Admitted()))
            connection.setblocking(True)
            self._handed_over.add(connection)
            name = f"raysgd-bulk-{first.worker}"
            threading.Thread(target=self._receive, args=(peer, first.worker), name=name, daemon=True).start()
            return
        assert isinstance(first, OpenTransfer)
        with self._expecting:
            take = self._expected.get(first.name)
            if take is not None:
                connection.send(framed(Admitted()))
                connection.setblocking(True)
                take(connection)
                return
        connection.send(framed(Rejected("the transfer has ended")))
        self._end(peer)

    def noting(self, worker: str) -> Callable[[], None]:
        """Return what reports now and then that a part of a message has arrived."""
        noted = time.monotonic()

        def note() -> None:
            nonlocal noted
            now = time.monotonic()
            if now - noted >= PART_EVERY_S:
                noted = now
                self._events.put(PartReceived(worker))

        return note

    def _receive(self, peer: _Peer, worker: str) -> None:
        """Receive the messages of a bulk connection, on its own thread."""
        connection = peer.connection
        try:
            while True:
                message, size = receive_message(connection)
                if not isinstance(message, SnapshotUpload | FunctionReport | StartDealer):
                    raise ValueError(f"{type(message).__name__} on a bulk connection")
                body = receive_body(connection, size, self.noting(worker))
                self._events.put(MessageReceived(worker, message, body))
                send(connection, Received())
        except OSError as error:  # the worker's end is reported by its control connection
            logger.debug("the bulk connection of worker %s has ended: %s", worker, error)
        except Exception as error:
            why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            with contextlib.suppress(RuntimeError):  # the server was closed
                self._loop.call_soon_threadsafe(self._refusals.add, peer.address, why)
        finally:
            self._handed_over.discard(connection)
            connection.close()


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


def _log_unexpected(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    logger.error(
        "unexpected error in the control thread, which continues: %s", context, exc_info=context.get("exception")
    )


def _listen(host: str, ports: range | None) -> socket.socket:
    try:
        return listen(host, ports)
    except OSError:  # behind NAT, the address that other machines use is not one of this machine: listen on all
        return listen("0.0.0.0", ports)
