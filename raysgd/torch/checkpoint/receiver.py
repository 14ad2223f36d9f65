"""The driver's end of a save: takes what a worker sends, and gives the file its name when it is complete. Driver.

Each worker that connects gets a draft of its own, so the bytes of two are never mixed, nor changed by a third. A draft
becomes the file when its size and its digest are those that its worker has sent (`streams` describes that end).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Protocol

from raysgd.core.connection import PIECE, ControlAddress, receive, receive_message, receive_some, send
from raysgd.core.messages import (
    CheckpointComplete,
    CheckpointDraft,
    CheckpointFailed,
    CheckpointPiece,
    CheckpointRoute,
    CheckpointWritten,
    Message,
)
from raysgd.errors import CheckpointError
from raysgd.storage.digest import HashingWriter
from raysgd.storage.locations import Draft, Place
from raysgd.torch.checkpoint.streaming import END_BYTES, SaveResult, StreamSink

__all__ = ["FailedOnWorkerError", "Receiver"]

logger = logging.getLogger("raysgd")

TICK_S = 0.1
CLOSE_S = 5.0
MARK_BYTES = 16


class FailedOnWorkerError(CheckpointError):
    """The worker could not write the checkpoint, and said why."""


class CheckpointServer(Protocol):
    """What a receiver needs of the control channel's server."""

    def address_for_workers(self) -> ControlAddress: ...
    def expect_checkpoint(self, take: Callable[[socket.socket], None]) -> str: ...
    def end_checkpoint(self, save: str) -> None: ...


class Receiver:
    """Owns the connections of one save, a thread, and `done`, which gets the path or the error. A worker that is lost may be
    followed by another one until the call of the workers has ended. After that, the one that is writing has `stall_s` for
    each sign of progress."""

    def __init__(self, path: Place, server: CheckpointServer, *, stall_s: float = 600.0) -> None:
        self._path, self._server, self._stall_s = path, server, stall_s
        self._result = SaveResult()
        self.done = self._result.future
        self._writer: Writer | None = None
        self._writing: threading.Thread | None = None
        self._ended_at: float | None = None
        self._given_up: BaseException | None = None
        with contextlib.ExitStack() as undo:  # Ctrl-C can come at any line, and nobody would close this
            draft = Draft(path)  # where no file can be made is reported now
            undo.callback(draft.drop)
            self._spare: Draft | None = draft
            self._connections: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
            self._save = server.expect_checkpoint(self._connections.put)
            undo.callback(self._end_admission)
            self.sink = StreamSink(server.address_for_workers(), self._save, stall_s)
            self._thread = threading.Thread(target=self._serve, name="raysgd-save", daemon=True)
            undo.callback(setattr, self, "_given_up", CheckpointError("the save was interrupted as it began"))
            self._thread.start()
            undo.pop_all()

    def call_ended(self) -> None:
        """The call of the workers has ended well: the one that is let in by now is the last."""
        self._ended_at = time.monotonic()

    def close(self, error: BaseException) -> None:
        """Give the save up with this error, unless it is complete. Nothing of it is left when this returns."""
        self._given_up = error
        self._thread.join(2 * CLOSE_S)

    def _serve(self) -> None:
        try:
            while not self.done.done():
                with contextlib.suppress(queue.Empty):
                    self._begin(self._connections.get(timeout=TICK_S))
                self._watch()
        except BaseException as error:
            self._result.fail(error)
        finally:
            self._end_admission()
            if self._spare is not None:
                self._spare.drop()
            if self._writer is not None and self._writing is not None:
                self._writer.cancel()
                self._writing.join(CLOSE_S)
                if self._writing.is_alive():  # in a call of the system's that does not return
                    self._writer.abandon()

    def _end_admission(self) -> None:
        self._server.end_checkpoint(self._save)
        with contextlib.suppress(queue.Empty):
            while True:
                self._connections.get_nowait().close()

    def _begin(self, connection: socket.socket) -> None:
        """The newest worker counts: the engine has asked it because the one before was lost."""
        old, self._writer = self._writer, Writer(connection, self._path, self._spare)
        self._spare = None
        if old is not None:
            old.cancel()
        self._writing = threading.Thread(target=self._take, args=(self._writer,), name="raysgd-save", daemon=True)
        self._writing.start()

    def _take(self, writer: Writer) -> None:
        """The thread of one writer."""
        try:
            writer.receive()
        except (ConnectionError, TimeoutError) as error:  # the second one when its machine cannot be reached
            writer.drop()
            writer.lost = error
        except BaseException as error:
            writer.drop()
            if writer is self._writer:
                self._result.fail(error)
        else:
            self._keep(writer)
        finally:
            writer.close()

    def _keep(self, writer: Writer) -> None:
        if not self._result.claim(writer):
            writer.drop()
            return
        try:
            kept = writer.draft.keep()
        except BaseException as error:
            writer.drop()
            self._result.fail(error, writer=writer)
        else:
            self._result.kept(kept)

    def _watch(self) -> None:
        """Ends what cannot come to an end any more. While the call of the workers runs, its own limits hold."""
        writer = self._writer
        if self._given_up is not None:
            self._end(self._given_up)
        elif self._ended_at is None:
            return
        elif writer is None:
            self._end(CheckpointError("the call of the workers has ended, and none of them has sent the checkpoint"))
        elif writer.lost is not None:
            error = CheckpointError(f"the worker that was sending the checkpoint was lost ({writer.lost})")
            error.__cause__ = writer.lost
            self._end(error)
        elif time.monotonic() - max(writer.moved_at, self._ended_at) > self._stall_s:
            self._end(
                CheckpointError(
                    f"the save to {self._path} was given up: nothing of it has moved for {self._stall_s:g} s. A file that "
                    "was there before is unharmed"
                )
            )

    def _end(self, error: BaseException) -> None:
        """Fail the save, once the draft of its writer is gone."""
        if self._writer is not None:
            self._writer.cancel()
            if self._writing is not None:
                self._writing.join(CLOSE_S)
        self._result.fail(error)


class Writer:
    """Owns the connection of one worker that was let in, and the draft that was made for it."""

    def __init__(self, connection: socket.socket, path: Place, draft: Draft | None) -> None:
        self._connection, self._path = connection, path
        self._draft = draft
        self.moved_at = time.monotonic()
        self.lost: OSError | None = None

    @property
    def draft(self) -> Draft:
        assert self._draft is not None
        return self._draft

    def receive(self) -> None:
        """Take the whole checkpoint. Return when it is in the draft, on the disk, and found to be what was sent."""
        self._draft = self._draft or Draft(self._path)
        mark = secrets.token_bytes(MARK_BYTES)
        self.draft.file.write(mark)
        send(self._connection, CheckpointDraft(mark.hex(), str(self.draft.temporary.absolute())))
        if receive(self._connection, CheckpointRoute).in_file:
            self._follow()
        else:
            self._take()
        self.draft.file.sync()

    def cancel(self) -> None:
        """From another thread: whatever the writer waits for ends now, and its draft does not get a name."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            logger.debug("a worker that was sending a checkpoint was gone already: %s", error)

    def drop(self) -> None:
        if self._draft is not None:
            self._draft.drop()

    def abandon(self) -> None:
        """From another thread: nobody waits for this one any more."""
        if self._draft is not None:
            self._draft.temporary.unlink(missing_ok=True)

    def close(self) -> None:
        self._connection.close()

    def _take(self) -> None:
        """The bytes come over the wire."""
        self.draft.file.restart()
        file, buffer = HashingWriter(self.draft.file), memoryview(bytearray(PIECE))
        try:
            message, length = self._next()
            while isinstance(message, CheckpointPiece):
                while length:
                    count = receive_some(self._connection, buffer[: min(length, PIECE)])
                    file.write(buffer[:count])
                    length -= count
                    self.moved_at = time.monotonic()
                message, length = self._next()
            end = self._ending(message)
            self._compare(end.size, end.digest, os.fstat(self.draft.file.fileno()).st_size, file.hexdigest())
        finally:
            file.close()

    def _follow(self) -> None:
        """The worker writes the file itself, and says how far it is. A checkpoint ends with a digest of what the worker had in
        memory, and every `load` verifies that; so only the file's size and its end are compared here."""
        message, _ = self._next()
        while isinstance(message, CheckpointWritten):
            message, _ = self._next()
        end = self._ending(message)
        # Anew: another machine's file system may have shown less until the worker closed the file.
        with open(self.draft.temporary, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - END_BYTES, 0))
            self._compare(end.size, end.digest, size, hashlib.sha256(file.read()).hexdigest())

    def _next(self) -> tuple[Message, int]:
        try:
            message = receive_message(self._connection)
        except ValueError as error:
            raise CheckpointError(f"a worker sent what is not part of a checkpoint: {error}") from error
        self.moved_at = time.monotonic()
        return message

    @staticmethod
    def _ending(message: Message) -> CheckpointComplete:
        """Return what follows the last piece: the size and the digest of everything. Raise the worker's error."""
        if isinstance(message, CheckpointFailed):
            raise FailedOnWorkerError(f"the checkpoint could not be written: {message.error}")
        if not isinstance(message, CheckpointComplete):
            raise CheckpointError(f"a worker sent {type(message).__name__} in the middle of its checkpoint")
        return message

    def _compare(self, size: int, digest: str, found: int, actual: str) -> None:
        self.moved_at = time.monotonic()
        if (size, digest) != (found, actual):
            raise CheckpointError(
                f"the draft for {self._path} is not what the worker has written: it has {found} bytes with the digest "
                f"{actual[:16]}..., and the worker sent {size} with {digest[:16]}... Something else has changed it, or the "
                "disk is faulty. A file that was there before is unharmed; save again"
            )
