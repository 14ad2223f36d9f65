"""Send a checkpoint from the worker that has it to a file of the driver, without ever holding all of it in memory. Worker.

The worker gets a `StreamSink`: the driver's address, and the secret name of the save. It opens a checkpoint connection of
the control channel. The driver creates a draft, a file for this connection alone, and sends its path. If the worker sees
that very file, because it is on the same machine or file system, it writes there and reports its progress; otherwise it
sends the bytes. At the end it sends the size and a checksum of what it wrote. The driver compares them with the draft
before it gives the draft the file's name (`receiver`).
"""

from __future__ import annotations

import io
import logging
import socket
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from raysgd.core.connection import PIECE, ControlAddress, RejectedError, connect, receive, send
from raysgd.core.messages import (
    CheckpointComplete,
    CheckpointDraft,
    CheckpointFailed,
    CheckpointPiece,
    CheckpointRoute,
    CheckpointWritten,
    Message,
    OpenTransfer,
)
from raysgd.errors import CheckpointError, described
from raysgd.storage.durable import DurableFile
from raysgd.storage.locations import Draft, Place, log_saved

__all__ = ["END_BYTES", "Disconnected", "LocalSink", "SaveResult", "Stream", "StreamSink"]

logger = logging.getLogger(__name__)

END_BYTES = 4096  # of a file that the worker writes itself, the driver compares its size and this much of its end
CONNECT_S = 60.0
AGAIN_S = 0.2
LONGEST_ERROR = 10_000


class SaveResult:
    """Owns the result of one save, a path or an error. It is set only once, by whichever thread is first. With `report`, the file is
    not a checkpoint itself."""

    def __init__(self, *, report: bool = False) -> None:
        self._is_report = report
        self.future: Future[str] = Future()
        self._lock = threading.Lock()
        self._claimed_by: Any = None

    def claim(self, writer: Any) -> bool:
        """Reserve the result for this writer, which is about to give the file its name. Return False if it is too late."""
        with self._lock:
            if not self.future.done() and self._claimed_by is None:
                self._claimed_by = writer
            return self._claimed_by is writer

    def succeed(self, path: Place) -> None:
        if not self._is_report:
            log_saved(path)  # before the result is set, so that a caller who waits for it finds the line in the log
        with self._lock:
            self.future.set_result(str(path))

    def fail(self, error: BaseException, *, writer: Any = None) -> None:
        with self._lock:
            if not self.future.done() and self._claimed_by in (None, writer):
                self.future.set_exception(error)


class LocalSink:
    """Writes the file itself, for a worker in the driver's process. It has the methods of `StreamSink`, `Stream` and
    `Receiver`. Both."""

    def __init__(self, path: Place, *, report: bool = False) -> None:
        self._path, self._result = path, SaveResult(report=report)
        self.done = self._result.future

    @property
    def sink(self) -> LocalSink:
        return self

    def connect(self) -> LocalSink:
        return self

    def send(self, write: Callable[[Any], Any]) -> None:
        """Run `write(file)`, and keep the file that it writes, or its error."""
        draft = None
        try:
            draft = Draft(self._path)
            _written(write, draft.file.write)
            draft.file.sync()
            if not self._result.claim(self):
                raise CheckpointError(f"the save to {self._path} was abandoned before the file was complete")
            kept = draft.keep()
        except BaseException as error:
            if draft is not None:
                draft.drop()
            self._result.fail(error, writer=self)
            raise
        self._result.succeed(kept)

    def close(self, error: BaseException) -> None:
        """Abandon the save: what is still being written does not get the file's name."""
        self._result.fail(error)

    give_up = close

    def moves(self) -> bool:
        """Return False: nothing waits for the file but this thread."""
        return False

    def call_ended(self) -> None:
        """Do nothing: no other worker could write the file."""


@dataclass(frozen=True)
class StreamSink:
    """Tells the worker where to send the checkpoint. If the driver accepts no data for `stall_s`, the save fails. With
    `shared=False`, the worker does not try whether it sees the driver's file."""

    address: ControlAddress
    save: str = field(repr=False)
    stall_s: float
    shared: bool = True

    def send(self, write: Callable[[Any], Any]) -> None:
        self.connect().send(write)

    def connect(self) -> Stream:
        """Connect, and receive the draft's path. Try again if the connection ends before that: a driver drops connections
        when it is flooded with them."""
        until = time.monotonic() + CONNECT_S
        while True:
            try:
                return self._connected()
            except (ConnectionRefusedError, RejectedError) as error:
                raise Disconnected("the driver has ended this save, and no longer waits for the checkpoint") from error
            except OSError as error:
                if time.monotonic() > until:
                    where = f"{self.address.host}:{self.address.port}"
                    raise Disconnected(f"the driver at {where} did not answer for {CONNECT_S:g} s ({error})") from error
            time.sleep(AGAIN_S)

    def _connected(self) -> Stream:
        connection = connect(self.address, OpenTransfer(self.save), patience_s=0.0, connect_s=CONNECT_S)
        try:
            draft = receive(connection, CheckpointDraft)
            connection.settimeout(self.stall_s)
            file = _opened(draft.path, bytes.fromhex(draft.mark)) if self.shared else None
            send(connection, CheckpointRoute(in_file=file is not None))
        except BaseException:
            connection.close()
            raise
        return Stream(connection, file)


def _opened(draft: str, mark: bytes) -> DurableFile | None:
    """Return the driver's draft if this process can write it. Only that very file begins with the mark."""
    try:
        file = DurableFile(draft, "r+b")
    except OSError:
        return None
    if file.read(len(mark) + 1) != mark:
        file.close()
        return None
    file.restart()
    return file


class Disconnected(CheckpointError):
    """The driver cannot be reached, or has abandoned the save; then it knows the reason."""


class Stream:
    """Owns the worker's end of a connection that the driver has accepted, over which it sends one checkpoint."""

    def __init__(self, connection: socket.socket, file: DurableFile | None) -> None:
        self._connection, self._file = connection, file
        self._checksum = self._size = 0

    def send(self, write: Callable[[Any], Any]) -> None:
        """Run `write(file)`, and send what it writes, or the error."""
        try:
            if self._file is None:
                written = _written(write, self._put)
                self._report(CheckpointComplete(written.size, self._checksum))
            else:
                written = _written(write, self._put_in_file)
                self._file.sync()
                self._file.close()  # some file systems show other machines what was written only then
                self._report(CheckpointComplete(written.size, zlib.crc32(written.end)))
        except BaseException as error:
            self.give_up(error)
            raise
        self._close()

    def give_up(self, error: BaseException) -> None:
        """Report the error to the driver, if it can be reached, and close the connection."""
        try:
            if not isinstance(error, Disconnected):
                self._report(CheckpointFailed(described(error)[:LONGEST_ERROR]))
        except Disconnected as disconnected:
            logger.debug("could not report to the driver that a save failed: %s", disconnected)
        finally:
            self._close()

    def _put(self, piece: memoryview) -> int:
        self._checksum = zlib.crc32(piece, self._checksum)
        self._report(CheckpointPiece(), piece)  # the socket's timeout is for one piece
        return len(piece)

    def _put_in_file(self, piece: memoryview) -> int:
        assert self._file is not None
        count = self._file.write(piece)
        self._size += count
        self._report(CheckpointWritten(self._size))
        return count

    def _report(self, message: Message, body: memoryview | bytes = b"") -> None:
        try:
            send(self._connection, message, body)
        except OSError as error:
            raise Disconnected(
                f"the connection to the driver broke while the checkpoint was saved ({error})"
            ) from error

    def _close(self) -> None:
        self._connection.close()
        if self._file is not None:
            self._file.close()


class _Writer(io.RawIOBase):
    """Passes everything on to `put`. Knows how much it was, its end, and the first error of `put`: `torch.save` tries to end its
    archive after an error, which raises another one."""

    def __init__(self, put: Callable[[memoryview], int]) -> None:
        self._put = put
        self.size, self.end = 0, b""
        self.failure: BaseException | None = None

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Write at most one piece and return its length, as an unbuffered file may."""
        piece = memoryview(data).cast("B")[:PIECE]
        try:
            count = self._put(piece)
        except BaseException as error:
            self.failure = self.failure or error
            raise
        self.size += count
        self.end = (self.end + bytes(piece[:count][-END_BYTES:]))[-END_BYTES:]
        return count


def _written(write: Callable[[Any], Any], put: Callable[[memoryview], int]) -> _Writer:
    """Run `write(file)` with a file that passes everything to `put`."""
    with _Writer(put) as writer:
        file = io.BufferedWriter(writer, PIECE)
        try:
            write(file)
            file.flush()
        except BaseException:
            if writer.failure is not None:
                raise writer.failure from None
            raise
    return writer
