"""A checkpoint's way from the worker that has it to a file of the driver's: as a stream, never whole in memory.

A worker gets a sink (an address and a word), writes into it, and ends it; the driver's receiver puts what comes into a
draft of the file and keeps it at the end. A worker that sees the draft itself, since it is on the same machine or file
system, writes it there, and the stream says only how that went. A stream that breaks leaves no file.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from raysgd.durable import DurableFile
from raysgd.errors import CheckpointError
from raysgd.storage import Draft, Place

__all__ = ["LocalSink", "Receiver", "StreamSink"]

HEAD = struct.Struct("!q")
END, FAILED = 0, -1
PIECE = 4 << 20
TOKEN_BYTES = 32


class LocalSink:
    """For a worker that is this very process: it writes the file itself."""

    def __init__(self, path: Place) -> None:
        self.done: Future[str] = Future()
        self._path = path

    @property
    def sink(self) -> LocalSink:
        return self

    def send(self, write: Callable[[Any], None]) -> None:
        """Runs `write(file)`; keeps what it wrote, or tells its error."""
        draft = None
        try:
            draft = Draft(self._path)
            with io.BufferedWriter(draft.file, PIECE) as file:
                write(file)
                file.flush()
                self.done.set_result(str(draft.keep()))
        except BaseException as error:
            if draft is not None:
                draft.drop()
            self.done.set_exception(error)
            raise

    def connect(self) -> LocalSink:
        return self

    def close(self) -> None:
        """Nothing listens."""


@dataclass(frozen=True)
class StreamSink:
    """Travels to the worker."""

    host: str
    port: int
    token: str = field(repr=False)
    draft: str
    mark: bytes = field(repr=False)

    def connect(self) -> Stream:
        connection = socket.create_connection((self.host, self.port), timeout=60)
        connection.settimeout(600)
        connection.sendall(self.token.encode())
        return Stream(connection, self._seen_here())

    def _seen_here(self) -> str | None:
        """The driver's very file, if this process can write it: only that one begins with the mark."""
        try:
            with open(self.draft, "r+b") as file:
                return self.draft if file.read(len(self.mark) + 1) == self.mark else None
        except OSError:
            return None

    def send(self, write: Callable[[Any], None]) -> None:
        self.connect().send(write)


class Stream(io.RawIOBase):
    """The worker's end. Each write goes with its length before it, so that an end can be told from a break."""

    def __init__(self, connection: socket.socket, direct: str | None) -> None:
        self._connection, self._direct = connection, direct

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        piece = memoryview(data).cast("B")
        if len(piece):
            self._connection.sendall(HEAD.pack(len(piece)))
            self._connection.sendall(piece)
        return len(piece)

    def send(self, write: Callable[[Any], None]) -> None:
        """Runs `write(file)`; ends the stream, or tells what went wrong."""
        with contextlib.closing(self._connection):
            try:
                if self._direct is None:
                    self._buffered(self, write)
                else:
                    with DurableFile(self._direct) as raw:
                        self._buffered(raw, write)
                        raw.sync()
            except ConnectionError:
                raise
            except BaseException as error:
                said = f"{type(error).__name__}: {error}".encode()
                self._connection.sendall(HEAD.pack(FAILED) + HEAD.pack(len(said)) + said)
                raise
            self._connection.sendall(HEAD.pack(END))

    @staticmethod
    def _buffered(raw: io.RawIOBase, write: Callable[[Any], None]) -> None:
        file = io.BufferedWriter(raw, PIECE)
        write(file)
        file.flush()
        file.detach()  # it would close what is not its own


class Receiver:
    """The driver's end: one file, a thread, and `done`, which has the path or the error. With `again`, a stream that
    breaks may be followed by another one from the start."""

    def __init__(self, path: Place, host: str, *, again: bool) -> None:
        self.done: Future[str] = Future()
        self._draft, self._again = Draft(path), again
        self._listener = _listen(host)
        self._listener.settimeout(0.5)
        self._token = secrets.token_hex(TOKEN_BYTES // 2)
        self._mark = secrets.token_bytes(16)
        self._draft.file.write(self._mark)
        self.sink = StreamSink(
            host, self._listener.getsockname()[1], self._token, str(self._draft.temporary.absolute()), self._mark
        )
        self._closed = False
        threading.Thread(target=self._serve, name="raysgd-save", daemon=True).start()

    def close(self) -> None:
        """Nobody will send any more."""
        self._closed = True

    def _serve(self) -> None:
        try:
            with self._listener:
                while not self.done.done():
                    self._accept()
        except BaseException as error:
            self.done.set_exception(error)
        finally:
            if self.done.exception() is not None:
                self._draft.drop()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            if self._closed:
                self.done.set_exception(CheckpointError("the save was given up before its worker sent anything"))
            return
        with connection:
            connection.settimeout(600)
            try:
                if hmac.compare_digest(_exactly(connection, TOKEN_BYTES), self._token.encode()):
                    self._receive(connection)
            except (ConnectionError, TimeoutError) as error:
                if not self._again:
                    raise CheckpointError(f"the worker that was sending the checkpoint was lost ({error})") from error
                self._draft.again()
                self._draft.file.write(self._mark)

    def _receive(self, connection: socket.socket) -> None:
        buffer = bytearray(PIECE)
        length = _number(connection)
        if length > END:
            self._draft.again()
        while length > END:
            _into_file(connection, length, self._draft.file, memoryview(buffer))
            length = _number(connection)
        if length == FAILED:
            said = _exactly(connection, _number(connection)).decode(errors="replace")
            self.done.set_exception(CheckpointError(f"the checkpoint could not be written: {said}"))
            return
        self.done.set_result(str(self._draft.keep()))


def _number(connection: socket.socket) -> int:
    return int(HEAD.unpack(_exactly(connection, HEAD.size))[0])


def _exactly(connection: socket.socket, length: int) -> bytes:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        view = view[_some(connection, view) :]
    return bytes(data)


def _into_file(connection: socket.socket, length: int, file: Any, buffer: memoryview) -> None:
    while length:
        count = _some(connection, buffer[: min(length, len(buffer))])
        piece = buffer[:count]
        while piece:
            piece = piece[file.write(piece) :]
        length -= count


def _some(connection: socket.socket, buffer: memoryview) -> int:
    count = connection.recv_into(buffer)
    if count == 0:
        raise ConnectionError("its connection ended early")
    return count


def _listen(host: str) -> socket.socket:
    try:
        return socket.create_server((host, 0))
    except OSError:  # the address that others know this machine by is not one of its own (NAT)
        return socket.create_server(("", 0))
