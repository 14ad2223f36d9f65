"""Write a checkpoint to the driver's draft, or give its content to the driver; now, or in a thread.
Worker."""

from __future__ import annotations

import contextlib
import io
import logging
import threading
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

from raysgd.core.channel.connection import PIECE
from raysgd.core.control import Control
from raysgd.errors import described
from raysgd.replica.steps.asking import NoDriver
from raysgd.storage.durable import DurableFile

logger = logging.getLogger("raysgd")

END_BYTES = 4096  # of a file that a worker wrote, the driver compares the size and this much of its end
Report = dict[str, Any]


def checkpoint(replica: Any) -> Any:
    """The complete checkpoint as bytes, on rank 0."""
    write = replica.checkpoint_writer(later=False)
    if write is None:
        return None
    buffer = io.BytesIO()
    write(buffer)
    return buffer.getbuffer()


def save(replica: Any, draft: str, transfers: list[str], later: bool) -> Report | None:
    """Write the checkpoint to the draft, from rank 0."""
    write = replica.checkpoint_writer(later=later)
    return None if write is None else reported(replica, transfers[0], partial(_write, draft, write), later=later)


def reported(
    replica: Any, transfer: str, write: Callable[[Callable[[Any], None]], Report], *, later: bool
) -> Report | None:
    """Call `write(give)`, now or in a thread, and report what it returns. It may give content to
    the driver."""
    control: Control = replica.control
    if not later:
        return write(lambda content: control.giving(transfer).send(content))
    try:
        giving = control.giving(transfer)  # opened now, so that the driver notices if this process ends
    except OSError as error:
        raise NoDriver(str(error)) from error

    def run() -> None:
        contents: list[Any] = []
        try:
            report = write(contents.append)
        except Exception as error:
            logger.warning("a save in the background failed", exc_info=True)  # the driver raises the error
            report = {"error": described(error)}
        try:
            giving.send(*contents, report=report)
        except OSError as error:
            logger.info("the driver no longer waits for a save in the background: %s", error)

    threading.Thread(target=run, name="raysgd-save", daemon=True).start()
    return None


def _write(draft: str, write: Callable[[Any], Any], give: Callable[[Any], None]) -> Report:
    file = None
    with contextlib.suppress(OSError):
        file = _OpenDraft(draft, "r+b")
    if file is None:  # this process does not see the driver's file, or cannot write it
        content = io.BytesIO()
        write(content)
        give(content.getbuffer())
        return {"given": True}
    with file:
        buffered = io.BufferedWriter(file, PIECE)
        try:
            write(buffered)
            buffered.flush()
        except BaseException:
            if file.failure is not None:  # torch tries to end its archive after an error, which raises another one
                raise file.failure from None
            raise
        file.sync()
        return {"size": file.size, "end": zlib.crc32(file.end)}


class _OpenDraft(DurableFile):
    """Knows how much was written to it, the end of that, and the first error."""

    size, end = 0, b""
    failure: BaseException | None = None

    def write(self, data: Any) -> int:
        """Write at most one piece and return its length, as an unbuffered file may."""
        piece = memoryview(data).cast("B")[:PIECE]
        try:
            count = super().write(piece)
        except BaseException as error:
            self.failure = self.failure or error
            raise
        self.size += count
        self.end = (self.end + bytes(piece[:count][-END_BYTES:]))[-END_BYTES:]
        return count
