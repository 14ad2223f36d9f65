"""The worker's end of a save: from the worker that has a checkpoint to a file of the driver's, never whole in memory. Worker.

The worker gets a sink: the driver's address, and the secret name of the save. It opens a checkpoint connection of the
control channel, and the driver makes a draft for this connection alone: a file, whose path it sends. A worker that sees
that very file, since it is on the same machine or file system, writes there, and reports how far it is; another one sends
its bytes. At the end it sends the size and the digest of what it wrote. The driver compares them with what is in the file
before the file gets its name (`receiver`).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import socket
import threading
import time
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
    OpenCheckpoint,
)
from raysgd.errors import CheckpointError
from raysgd.storage.digest import HashingWriter
from raysgd.storage.durable import DurableFile
from raysgd.storage.locations import Draft, Place

__all__ = ["Disconnected", "LocalSink", "SaveResult", "Stream", "StreamSink", "written"]

logger = logging.getLogger(__name__)

END_BYTES = 4096  # of a file that the worker writes itself, the driver compares its size and this much of its end
CONNECT_S = 60.0
AGAIN_S = 0.2
LONGEST_ERROR = 10_000


class SaveResult:
    """Owns what comes of one save: a path or an error, decided once, whoever else would decide it too."""

    def __init__(self) -> None:
        self.future: Future[str] = Future()
        self._deciding = threading.Lock()
        self._claimed_by: Any = None

    def claim(self, writer: Any) -> bool:
        """From now on only this writer decides, since it is about to give the file its name. False: it is too late."""
        with self._deciding:
            if not self.future.done() and self._claimed_by is None:
                self._claimed_by = writer
            return self._claimed_by is writer

    def kept(self, path: Place) -> None:
        with self._deciding:
            self.future.set_result(str(path))

    def fail(self, error: BaseException, *, writer: Any = None) -> None:
        with self._deciding:
            if not self.future.done() and self._claimed_by in (None, writer):
                self.future.set_exception(error)


class LocalSink:
    """For a worker that is this very process: it writes the file itself."""

    def __init__(self, path: Place) -> None:
        self._path, self._result = path, SaveResult()
        self.done = self._result.future

    @property
    def sink(self) -> LocalSink:
        return self

    def connect(self) -> LocalSink:
        return self

    def send(self, write: Callable[[Any], Any]) -> None:
        """Run `write(file)`. Keep what it wrote, or its error."""
        draft = None
        try:
            draft = Draft(self._path)
            written(write, draft.file)
            draft.file.sync()
            if not self._result.claim(self):
                raise CheckpointError(f"the save to {self._path} was given up before the file was complete")
            kept = draft.keep()
        except BaseException as error:
            if draft is not None:
                draft.drop()
            self._result.fail(error, writer=self)
            raise
        self._result.kept(kept)

    def close(self, error: BaseException) -> None:
        """Give the save up: what is still being written does not get the file's name."""
        self._result.fail(error)

    give_up = close

    def call_ended(self) -> None:
        """There never is another writer."""


@dataclass(frozen=True)
class StreamSink:
    """Travels to the worker. A write that is not taken for `stall_s` is an error. `shared=False`: the worker does not even
    look whether it sees the driver's file."""

    address: ControlAddress
    save: str = field(repr=False)
    stall_s: float
    shared: bool = True

    def send(self, write: Callable[[Any], Any]) -> None:
        self.connect().send(write)

    def connect(self) -> Stream:
        """Connect, and learn of the draft. A connection that ends before that is tried again: a driver that is flooded with
        clients drops some of them."""
        until = time.monotonic() + CONNECT_S
        while True:
            try:
                return self._admitted()
            except (ConnectionRefusedError, RejectedError) as error:
                raise Disconnected(
                    "the driver has ended this save, and does not wait for the checkpoint any more"
                ) from error
            except OSError as error:
                if time.monotonic() > until:
                    raise Disconnected(
                        f"the driver at {self.address.host}:{self.address.port} did not answer for {CONNECT_S:g} s ({error})"
                    ) from error
            time.sleep(AGAIN_S)

    def _admitted(self) -> Stream:
        connection = connect(self.address, OpenCheckpoint(self.save), patience_s=0.0, connect_s=CONNECT_S)
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
    """The driver's very file, if this process can write it: only that one begins with the mark."""
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
    """The driver is not there any more, or has given the save up; then it knows why."""


class Stream:
    """The worker's end of an admitted connection, over which it sends one checkpoint."""

    def __init__(self, connection: socket.socket, file: DurableFile | None) -> None:
        self._connection, self._file = connection, file

    @property
    def in_file(self) -> bool:
        """Does this worker write the driver's file itself?"""
        return self._file is not None

    def send(self, write: Callable[[Any], Any]) -> None:
        """Run `write(file)`. Send what it writes, with its size and digest at the end; or say what went wrong."""
        try:
            if self._file is None:
                size, digest = written(write, _OverWire(self._tell))
            else:
                target = _InFile(self._tell, self._file)
                size, _ = written(write, target)
                self._file.sync()
                self._file.close()  # first, for file systems that show others what was written when it is closed
                digest = hashlib.sha256(target.end).hexdigest()
            self._tell(CheckpointComplete(size, digest))
        except BaseException as error:
            self.give_up(error)
            raise
        self._close()

    def give_up(self, error: BaseException) -> None:
        """Tell the driver that there will be no checkpoint, and why."""
        why = f"{type(error).__name__}: {error}"[:LONGEST_ERROR]
        try:
            if not isinstance(error, Disconnected):
                self._tell(CheckpointFailed(why))
        except Disconnected as gone:
            logger.debug("the driver could not be told that a save failed: %s", gone)
        finally:
            self._close()

    def _tell(self, message: Message, body: memoryview | bytes = b"") -> None:
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


class _OverWire:
    """Sends each piece as a message."""

    def __init__(self, tell: Callable[..., None]) -> None:
        self._tell = tell

    def write(self, data: Any) -> int:
        piece = memoryview(data).cast("B")[:PIECE]  # a socket's limit is for one piece
        if len(piece):
            self._tell(CheckpointPiece(), piece)
        return len(piece)


class _InFile:
    """Writes the driver's file, and says how far it is. `end` is what it wrote last."""

    def __init__(self, tell: Callable[..., None], file: DurableFile) -> None:
        self._tell, self._file, self._at = tell, file, 0
        self.end = b""

    def write(self, data: Any) -> int:
        count = self._file.write(data)
        self._at += count
        self.end = (self.end + bytes(memoryview(data).cast("B")[:count][-END_BYTES:]))[-END_BYTES:]
        self._tell(CheckpointWritten(self._at))
        return count


class _CheckpointFile(io.BufferedWriter):
    """What is written into. It knows the digest of that, which a `SealingWriter` uses."""

    def hexdigest(self) -> str:
        self.flush()
        return self.raw.hexdigest()  # type: ignore[no-any-return, attr-defined]


class _Watched(HashingWriter):
    """Remembers its first error: torch.save ends its archive after one, and raises another one then."""

    failure: BaseException | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BaseException as error:
            self.failure = self.failure or error
            raise


def written(write: Callable[[Any], Any], target: Any) -> tuple[int, str]:
    """Run `write(file)`, with a file that passes everything on to `target`. Return the size and the digest of that."""
    with contextlib.closing(_Watched(target)) as watched:
        file = _CheckpointFile(watched, PIECE)
        try:
            write(file)
            file.flush()
        except BaseException:
            if watched.failure is not None:
                raise watched.failure from None
            raise
        return watched.written, watched.hexdigest()
