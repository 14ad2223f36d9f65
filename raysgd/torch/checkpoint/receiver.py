"""Receive a checkpoint from a worker, and give the file its name when it is complete. Driver.

Each worker that connects gets a draft of its own, so that workers cannot mix or change each other's bytes. A draft becomes
the file if its size and checksum are those that its worker sends. `streaming` is the worker's side.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import secrets
import socket
import threading
import time
import zlib
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
from raysgd.storage.locations import Draft, Place
from raysgd.torch.checkpoint.streaming import END_BYTES, SaveResult, StreamSink

__all__ = ["CheckpointServer", "FailedOnWorkerError", "Receiver"]

logger = logging.getLogger("raysgd")

TICK_S, MOVES_S = 0.1, 2.0
CLOSE_S = 5.0
MARK_BYTES = 16


class FailedOnWorkerError(CheckpointError):
    """The worker could not write the checkpoint, and sent the reason."""


class CheckpointServer(Protocol):
    """What a receiver needs from the control channel's server."""

    def address_for_workers(self) -> ControlAddress: ...
    def expect_transfer(self, take: Callable[[socket.socket], None]) -> str: ...
    def end_transfer(self, save: str) -> None: ...


class Receiver:
    """Owns the connections of one save, a thread, and `done`, which gets the path or the error.

    If a worker fails, another one may send the checkpoint, until the workers' call has ended. After that, the worker that is
    sending must make progress every `stall_s` seconds. With `report`, the file only tells what the worker has written elsewhere.
    """

    def __init__(self, path: Place, server: CheckpointServer, *, stall_s: float = 600.0, report: bool = False) -> None:
        self._path, self._server, self._stall_s = path, server, stall_s
        self._result = SaveResult(report=report)
        self.done = self._result.future
        self._writer: Writer | None = None
        self._call_ended_at: float | None = None
        self._abandoned: BaseException | None = None
        with contextlib.ExitStack() as undo:  # Ctrl-C can come at any line, and nothing else would close this
            Draft(path).drop()  # raises now if no file can be created there
            self._save = server.expect_transfer(self._accept)
            undo.callback(server.end_transfer, self._save)
            self.sink = StreamSink(server.address_for_workers(), self._save, stall_s)
            self._thread = threading.Thread(target=self._watch, name="raysgd-save", daemon=True)
            undo.callback(setattr, self, "_abandoned", CheckpointError("the save was interrupted when it began"))
            self._thread.start()
            undo.pop_all()

    def call_ended(self) -> None:
        """Note that the workers' call has succeeded, so that no other worker will connect."""
        self._call_ended_at = time.monotonic()

    def moves(self) -> bool:
        """Return whether the worker has made progress a moment ago: a slow transfer is no hang."""
        writer = self._writer
        return writer is not None and time.monotonic() - writer.moved_at < MOVES_S

    def close(self, error: BaseException) -> None:
        """Abandon the save with this error, unless it is complete, and return when its draft is deleted."""
        self._abandoned = error
        self._thread.join(2 * CLOSE_S)

    def _watch(self) -> None:
        """In the receiver's thread: wait for the end of the save, or for a reason to end it."""
        while not self.done.done():
            concurrent.futures.wait([self.done], TICK_S)
            error = self._reason_to_end()
            if error is not None:
                self._server.end_transfer(self._save)  # first, so that no other writer starts
                if self._writer is not None:
                    self._writer.stop()  # before the error is raised, so that its draft is deleted by then
                self._result.fail(error)  # unless the writer is just giving the file its name
        self._server.end_transfer(self._save)
        if self._writer is not None:
            self._writer.stop()
            if self._writer.thread.is_alive():  # in a system call that does not return
                self._writer.unlink()

    def _accept(self, connection: socket.socket) -> None:
        """In the control thread: receive only from the newest worker. The engine asked it to send because the one before
        has failed."""
        writer = Writer(connection, self._path)
        writer.thread = threading.Thread(target=self._receive, args=(writer,), name="raysgd-save", daemon=True)
        try:
            writer.thread.start()
        except RuntimeError as error:  # the system has no thread left
            writer.close()
            self._result.fail(error)
            return
        old, self._writer = self._writer, writer
        if old is not None:
            old.replaced = True
            old.disconnect()

    def _receive(self, writer: Writer) -> None:
        """In the writer's thread: receive the checkpoint, and keep the draft if it is complete."""
        try:
            writer.receive()
        except (ConnectionError, TimeoutError) as error:  # TimeoutError: its machine cannot be reached
            writer.drop()
            writer.failure = error
        except BaseException as error:
            writer.drop()
            if not writer.replaced:
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
            self._result.succeed(kept)

    def _reason_to_end(self) -> BaseException | None:
        """Return the error if the save cannot complete any more. While the workers' call runs, its own limits apply."""
        writer = self._writer
        if self._abandoned is not None or self._call_ended_at is None:
            return self._abandoned
        if writer is None:
            return CheckpointError("the workers' call has ended, but no worker has sent the checkpoint")
        if writer.failure is not None:
            error = CheckpointError(f"the worker that was sending the checkpoint failed ({writer.failure})")
            error.__cause__ = writer.failure
            return error
        if time.monotonic() - max(writer.moved_at, self._call_ended_at) > self._stall_s:
            return CheckpointError(
                f"the save to {self._path} was abandoned: it has made no progress for {self._stall_s:g} s. An older file "
                "of that name is unchanged"
            )
        return None


class Writer:
    """Owns the connection of one worker, the draft for it, and the thread that receives from it."""

    thread: threading.Thread

    def __init__(self, connection: socket.socket, path: Place) -> None:
        self._connection, self._path = connection, path
        self._draft: Draft | None = None
        self.moved_at = time.monotonic()
        self.failure: OSError | None = None
        self.replaced = False

    @property
    def draft(self) -> Draft:
        assert self._draft is not None
        return self._draft

    def receive(self) -> None:
        """Return when the complete checkpoint is in the draft, is on the disk, and is what the worker sent."""
        self._draft = Draft(self._path)
        mark = secrets.token_bytes(MARK_BYTES)
        self.draft.file.write(mark)
        send(self._connection, CheckpointDraft(mark.hex(), str(self.draft.temporary.absolute())))
        if receive(self._connection, CheckpointRoute).in_file:
            self._follow()
        else:
            self._receive_pieces()
        self.draft.file.sync()

    def disconnect(self) -> None:
        """From another thread: end what the writer waits for. Its draft does not become the file."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            logger.debug("a worker that was sending a checkpoint had disconnected already: %s", error)

    def stop(self) -> None:
        """From another thread: disconnect, and wait for the writer's thread to end."""
        self.disconnect()
        self.thread.join(CLOSE_S)

    def unlink(self) -> None:
        """From another thread: delete the draft's file, which the writer may still be using."""
        if self._draft is not None:
            self._draft.temporary.unlink(missing_ok=True)

    def drop(self) -> None:
        if self._draft is not None:
            self._draft.drop()

    def close(self) -> None:
        self._connection.close()

    def _receive_pieces(self) -> None:
        """Write the bytes that the worker sends to the draft."""
        self.draft.file.restart()
        checksum, buffer = 0, memoryview(bytearray(PIECE))
        message, length = self._next()
        while isinstance(message, CheckpointPiece):
            while length:
                count = receive_some(self._connection, buffer[: min(length, PIECE)])
                checksum = zlib.crc32(buffer[:count], checksum)
                left = buffer[:count]
                while left:
                    left = left[self.draft.file.write(left) :]
                length -= count
                self.moved_at = time.monotonic()
            message, length = self._next()
        self._compare(message, os.fstat(self.draft.file.fileno()).st_size, checksum)

    def _follow(self) -> None:
        """Wait while the worker writes the draft itself. A checkpoint ends with the checksums of what the worker had in memory,
        which every `load` verifies, so only the size and the end of the file are compared here."""
        message, _ = self._next()
        while isinstance(message, CheckpointWritten):
            message, _ = self._next()
        # Open it again: another machine's file system may have shown less until the worker closed the file.
        with open(self.draft.temporary, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - END_BYTES, 0))
            self._compare(message, size, zlib.crc32(file.read()))

    def _next(self) -> tuple[Message, int]:
        try:
            message = receive_message(self._connection)
        except ValueError as error:
            raise CheckpointError(f"a worker sent something that is not part of a checkpoint: {error}") from error
        self.moved_at = time.monotonic()
        return message

    def _compare(self, end: Message, size: int, checksum: int) -> None:
        """Raise the worker's error, or a CheckpointError if the draft is not what the worker wrote."""
        self.moved_at = time.monotonic()
        if isinstance(end, CheckpointFailed):
            raise FailedOnWorkerError(f"the checkpoint could not be written: {end.error}")
        if not isinstance(end, CheckpointComplete):
            raise CheckpointError(f"a worker sent {type(end).__name__} in the middle of its checkpoint")
        if (end.size, end.checksum) != (size, checksum):
            raise CheckpointError(
                f"the draft for {self._path} is not what the worker wrote: it has {size} bytes with the checksum {checksum:08x}, "
                f"and the worker wrote {end.size} with {end.checksum:08x}. Another program has changed it, or the disk is faulty. "
                "An older file of that name is unchanged; save again"
            )
