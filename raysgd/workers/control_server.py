"""Serve the driver's end of the control channel: admit workers, make events. Driver."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import pickle
import queue
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy

from raysgd.core.channel import frames, messages
from raysgd.core.channel.connection import Connection, ControlAddress, as_timeout, detect_unreachable
from raysgd.core.channel.network import listen
from raysgd.core.decisions.lease import LEASE_S
from raysgd.environment import control_ports
from raysgd.errors import described
from raysgd.workers.events import Event, MessageReceived, WorkerEnded, WorkerStarted

logger = logging.getLogger(__name__)

ENDED = "its process ended (its control connection was closed)"
UNREAD = "it has not read any message for a long time"

# Clients without the key can hold at most this many connections (or two for each worker that is expected, because all
# workers may connect at once), each for this long, and the server reads no more than a proof from each. A worker sends
# its first message at once.
ADMISSION_S = 5.0
UNADMITTED_AT_MOST = 128

ACCEPT_PAUSE_S = 1.0
CLOSE_S = 2.0
PART_EVERY_S = 1.0
GREET_S = LEASE_S / 4
NO_RESOURCES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
RECEIVED_AT_ONCE = 1 << 16
SEND_BUFFER = 1 << 18  # for several calls, because nothing waits for a worker to read them
Serve = Callable[[Connection, str], None]


class _Peer:
    """One connection in the control thread: not admitted yet, or the one of `worker`."""

    ended: asyncio.Future[None]
    task: asyncio.Task[None]
    heard_at: float  # when the worker last sent something

    def __init__(self, opened: socket.socket, address: Any) -> None:
        self.socket, self.host = opened, str(address[0])
        self.worker = ""
        self.received = bytearray()  # the beginning of a message that is not complete
        self.refused = ""  # why it is closed


class ControlServer:
    """Owns the listening socket, all connections of workers, and the control thread. Turns what
    workers send into events, and decides nothing.

    The control thread runs an asyncio loop: it admits every connection, reads the control
    connections, and sends on them. Each other connection gets a thread of its own once it is
    admitted, so that no transfer delays a heartbeat.

    When a process ends, so does its control connection, which is a `WorkerEnded` event within
    milliseconds, usually before Ray reports the end. A connection also ends if the other machine
    acknowledges nothing for `unreachable_s`. Whatever one connection sends, an error ends only that
    connection."""

    def __init__(
        self, events: queue.SimpleQueue[Event], host: str, *, node: str = "", admission_s: float = ADMISSION_S
    ) -> None:
        """`node` is the name of this machine's node, as workers on it give it."""
        self._node = node
        self._key = secrets.token_bytes(frames.KEY_BYTES)
        self._admission_s = admission_s
        self.unreachable_s = 60.0
        self.expected_workers = 0
        self._events = events
        self._workers: dict[str, _Peer] = {}
        self._greeted_at = 0.0
        self._unadmitted: dict[_Peer, None] = {}  # the oldest first
        self._outgoing: deque[tuple[_Peer, messages.Message]] = deque()
        self._handed_over: set[socket.socket] = set()
        self._expected: dict[str, Serve] = {"": self._receive}
        self._names = itertools.count(1)
        self._refused_hosts: set[str] = set()
        self._listener = listen("the driver", host, control_ports())
        self._listener.setblocking(False)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._short_of_resources = False  # logged once, until connections can be accepted again
        self._loop = asyncio.SelectorEventLoop()  # even if the user has set another event loop policy
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="raysgd-control", daemon=True)
        self._thread.start()

    def address_for_workers(self) -> ControlAddress:
        return ControlAddress(*self.address, self._key, self.unreachable_s)

    # -- any thread -----------------------------------------------------------------------------------

    def send(self, worker: str, message: messages.Message) -> bool:
        """Send a message to a worker without blocking. Return False if it has no connection, which
        is or will be reported as a `WorkerEnded` event."""
        peer = self._workers.get(worker)
        if peer is None:
            return False
        self._post(peer, message)
        return True

    def _post(self, peer: _Peer, message: messages.Message) -> None:
        """Let the control thread send a message, as it also closes the connections."""
        self._outgoing.append((peer, message))
        with contextlib.suppress(RuntimeError):  # the server was closed
            self._loop.call_soon_threadsafe(self._send_all)

    def is_connected(self, worker: str) -> bool:
        return worker in self._workers

    def silent_for(self, worker: str) -> float:
        """The seconds since the worker last sent anything (it does so every second)."""
        peer = self._workers.get(worker)
        return 0.0 if peer is None else time.monotonic() - peer.heard_at

    def disconnect(self, worker: str) -> None:
        """Forget a worker that is not needed: the end of its connection is not an event."""
        peer = self._workers.pop(worker, None)
        if peer is not None:
            self._post(peer, messages.Bye())

    def expect_transfer(self, serve: Serve) -> str:
        """Name a new transfer. `serve` gets each of its connections in a thread."""
        name = str(next(self._names))
        self._expected[name] = serve
        return name

    def end_transfer(self, name: str) -> None:
        self._expected.pop(name, None)

    def greet(self) -> None:
        """Let the workers know now and then that this process runs."""
        if time.monotonic() - self._greeted_at > GREET_S:
            self._greeted_at = time.monotonic()
            for worker in list(self._workers):
                self.send(worker, messages.Alive())

    def close(self, *, dismiss: bool = True) -> None:
        """End all connections. With `dismiss`, the workers end, too."""
        for worker in list(self._workers) if dismiss else ():
            self.disconnect(worker)
        if self._closing.acquire(blocking=False):  # only once, as the loop runs again to end the connections
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=CLOSE_S)

    # -- the control thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.add_reader(self._listener, self._accept)
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

    def _accept(self) -> None:
        """Accept one connection. The loop serves all others first, so that a worker with its first
        message is admitted before newer connections take its place."""
        try:
            opened, address = self._listener.accept()
        except OSError as error:
            if error.errno in NO_RESOURCES:
                self._pause_accepting(error)
            return
        self._short_of_resources = False
        peer = _Peer(opened, address)
        self._unadmitted[peer] = None
        peer.task = self._loop.create_task(self._serve(peer))
        most = max(UNADMITTED_AT_MOST, 2 * self.expected_workers)
        if len(self._unadmitted) > most:
            oldest = next(iter(self._unadmitted))
            self._refuse(oldest, f"more than {most} connections were waiting to be admitted")

    def _pause_accepting(self, error: OSError) -> None:
        """Stop accepting connections for a while. The waiting connection stays in the kernel's
        queue, so the listener would be ready again at once."""
        if not self._short_of_resources:
            logger.warning("cannot accept connections of workers (%s): trying again every %g s", error, ACCEPT_PAUSE_S)
        self._short_of_resources = True
        self._loop.remove_reader(self._listener)
        self._loop.call_later(ACCEPT_PAUSE_S, self._loop.add_reader, self._listener, self._accept)

    def _refuse(self, peer: _Peer, why: str) -> None:
        self._unadmitted.pop(peer, None)
        peer.refused = why
        peer.task.cancel()

    async def _serve(self, peer: _Peer) -> None:
        """Admit a connection. Read it, if it is a control connection, or hand it over."""
        why, reason = ENDED, "worker death"
        late = f"it did not prove the key and send its first message within {self._admission_s:g} s"
        deadline = self._loop.call_later(self._admission_s, self._refuse, peer, late)
        try:
            first = await self._admit(peer)
            deadline.cancel()
            self._unadmitted.pop(peer, None)
            if not isinstance(first, messages.Hello):
                self._handed_over.add(peer.socket)
                name = "raysgd-transfer" if first.transfer else "raysgd-bulk"
                threading.Thread(target=self._serve_alone, args=(peer, first), name=name, daemon=True).start()
                return
            await self._read_control(peer, first)
        except asyncio.CancelledError:
            why = peer.refused
        except TimeoutError:
            why, reason = f"its machine has not answered for {self.unreachable_s:g} s", "network"
        except BlockingIOError:
            why, reason = UNREAD, "network"
        except OSError as error:
            logger.debug("the connection from %s has ended: %s", peer.host, error)
        except Exception as error:  # whatever one connection sends, the others are served
            peer.refused = _in_words(error)
            why, reason = f"its control connection was closed: {peer.refused}", "network"
        peer.socket.close()
        deadline.cancel()
        self._unadmitted.pop(peer, None)
        # `disconnect` may be faster, also between these two steps.
        if self._workers.get(peer.worker) is peer and self._workers.pop(peer.worker, None) is not None:
            self._events.put(WorkerEnded(peer.worker, why, reason))
        if peer.refused:  # last, as the user's log handlers may be slow, or raise
            # As a warning only the first one of each machine, because there may be very many.
            level = logging.DEBUG if peer.host in self._refused_hosts else logging.WARNING
            self._refused_hosts.add(peer.host)
            logger.log(level, "refused a connection from %s to the control channel: %s", peer.host, peer.refused)

    async def _admit(self, peer: _Peer) -> messages.Hello | messages.Open:
        """Let the other end prove that it has the key, and return its first message. Nothing behind
        the proof is read before that is complete and verified, and who has proved it is trusted."""
        peer.socket.setblocking(False)
        peer.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        detect_unreachable(peer.socket, self.unreachable_s)
        mine = frames.new_number()
        peer.socket.send(frames.GREETING + mine)
        answer = await self._exactly(peer, frames.NUMBER_BYTES + frames.PROOF_BYTES)
        numbers = mine + answer[: frames.NUMBER_BYTES]
        if not frames.proves(answer[frames.NUMBER_BYTES :], self._key, frames.WORKER, numbers):
            raise ValueError("it does not have this trainer's key")
        size, _ = frames.SIZES.unpack(await self._exactly(peer, frames.SIZES.size))
        first: messages.Hello | messages.Open = pickle.loads(await self._exactly(peer, size))
        if isinstance(first, messages.Hello) and first.worker in self._workers:
            raise ValueError(f"worker {first.worker} is connected already")
        peer.socket.send(frames.proof(self._key, frames.DRIVER, numbers))
        return first

    async def _exactly(self, peer: _Peer, size: int) -> bytes:
        """Read the next `size` bytes. (asyncio's StreamReader would read ahead: past the proof, and
        into what follows the first message of a connection that is handed over.)"""
        data = bytearray()
        while len(data) < size:
            try:
                received = await self._loop.sock_recv(peer.socket, size - len(data))
            except OSError as error:
                raise as_timeout(error) from None
            if not received:
                raise ConnectionError("it was closed")
            data += received
        return bytes(data)

    # -- control connections --------------------------------------------------------------------------

    async def _read_control(self, peer: _Peer, hello: messages.Hello) -> None:
        peer.worker, peer.ended, peer.heard_at = hello.worker, self._loop.create_future(), time.monotonic()
        self._workers[hello.worker] = peer
        local = hello.node == self._node
        self._events.put(WorkerStarted(hello.worker, hello.node, hello.pid, peer.host, local=local, gpus=hello.gpus))
        self._loop.add_reader(peer.socket, self._read, peer)
        try:
            await peer.ended
        finally:
            self._loop.remove_reader(peer.socket)

    def _read(self, peer: _Peer) -> None:
        """Take what has arrived on a control connection. The loop calls this directly, because a
        coroutine that waits for each message would cost several times as much."""
        try:
            data = peer.socket.recv(RECEIVED_AT_ONCE)
            if not data:
                raise ConnectionError("it was closed")
            peer.heard_at = time.monotonic()
            peer.received += data
            for message in frames.taken(peer.received):
                # Otherwise, `disconnect` was called.
                if self._workers.get(peer.worker) is peer and not isinstance(message, messages.Alive):
                    self._events.put(MessageReceived(peer.worker, message))
            self._send_all()  # what `_post` could not announce, because the user pressed Ctrl-C in it
        except BlockingIOError:
            return
        except Exception as error:
            self._broken(peer, as_timeout(error) if isinstance(error, OSError) else error)

    def _send_all(self) -> None:
        for _ in range(len(self._outgoing)):  # and not more, so that the loop also does its other work
            peer, message = self._outgoing.popleft()
            if peer.ended.done():
                continue
            try:
                frame = frames.framed(message)
                if peer.socket.send(frame) < len(frame):
                    raise BlockingIOError(UNREAD)
            except BlockingIOError as error:  # after a part of a frame, nothing else can be sent
                self._broken(peer, error)
            except OSError as error:
                logger.debug("a worker on %s has ended: %s", peer.host, error)  # which its reader reports

    @staticmethod
    def _broken(peer: _Peer, error: Exception) -> None:
        if not peer.ended.done():
            peer.ended.set_exception(error)

    # -- other connections ----------------------------------------------------------------------------

    def _serve_alone(self, peer: _Peer, first: messages.Open) -> None:
        """Serve a connection in this thread. One for a transfer that has ended ends at once."""
        peer.socket.setblocking(True)
        try:
            if (serve := self._expected.get(first.transfer)) is not None:
                serve(Connection(peer.socket), first.worker)
        except OSError as error:  # the worker's end is reported by its control connection
            logger.debug("a connection from %s has ended: %s", peer.host, error)
        except Exception as error:
            logger.warning("closed a connection from %s: %s", peer.host, _in_words(error))
        finally:
            self._handed_over.discard(peer.socket)
            peer.socket.close()

    def _receive(self, connection: Connection, worker: str) -> None:
        while True:
            message, size = connection.receive()
            note = self.make_note(worker)
            sizes = message.sizes if isinstance(message, messages.CallAnswer) else ()
            # The user gets the parts of an answer, and other bodies are kept.
            parts = [connection.receive_body(each, note, room=numpy.empty(each, numpy.uint8).data) for each in sizes]
            body = parts or connection.receive_body(size, note)
            acknowledge = partial(_acknowledge, connection)
            if isinstance(message, messages.FunctionReport):
                self._events.put(MessageReceived(worker, message, body, acknowledge))
            else:
                self._events.put(MessageReceived(worker, message, body))
                acknowledge()

    def make_note(self, worker: str) -> Callable[..., None]:
        """Make a function that reports now and then that a part of a message has arrived."""
        noted = time.monotonic()

        def note(complete: int = 0) -> None:
            nonlocal noted
            now = time.monotonic()
            if now - noted >= PART_EVERY_S:
                noted = now
                self._events.put(MessageReceived(worker, messages.Moved()))

        return note


def _acknowledge(connection: Connection) -> None:
    try:
        connection.send(messages.Received())
    except OSError as error:  # a rank that was stopped meanwhile has closed it
        logger.debug("a message could not be acknowledged: %s", error)


def _in_words(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else described(error)
