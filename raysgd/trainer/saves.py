"""Save a trainer's state: workers write a draft and report, and the driver gives it its name when
it is complete. Driver.

The driver creates a new draft whenever the workers are asked to write, so that a worker from before
a failure never writes to the draft of another one. A worker that does not see the driver's file
gives its content instead (`workers.transfer`). With `blocking=False`, workers copy the state, and
write and report in a thread.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from raysgd.config import check_flags
from raysgd.core.protocols import Call
from raysgd.engine.call import Job
from raysgd.engine.engine import Engine
from raysgd.errors import CheckpointError
from raysgd.replica import writing
from raysgd.replica.writing import END_BYTES, Report
from raysgd.storage import locations
from raysgd.trainer.auto_checkpoint import WriterFailed
from raysgd.workers.transfer import AnyTransfer

logger = logging.getLogger("raysgd")

SHUTDOWN_S = 600.0
STALL_AT_LEAST_S = 60.0  # a disk may need that long to flush its cache
LOOK_S, MOVES_S = 0.1, 2.0


class DraftOfSave(Protocol):
    """What becomes a checkpoint. A new one is made whenever the workers are asked to write."""

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Those of the workers' call that concern it."""

    def size(self) -> int:
        """How much of it has been written, as far as that is known."""

    def complete(self, reports: Sequence[Report], content: Callable[[], Any]) -> None:
        """Give the draft its name. `reports` are those of the workers that have written; `content`
        returns what the first of them gave."""

    def drop(self) -> None:
        """Delete the draft, unless it is complete."""


MakeDraft = Callable[[locations.Place], DraftOfSave]


class FileDraft(locations.Draft):
    """The draft of a checkpoint that is one file, or one object at a URI. Its name is random, so a
    worker that finds a file of this name sees the driver's."""

    @property
    def arguments(self) -> Mapping[str, Any]:
        return {"draft": str(self.temporary.absolute())}

    def size(self) -> int:
        return os.stat(self.temporary).st_size

    def complete(self, reports: Sequence[Report], content: Callable[[], Any]) -> None:
        (report,) = reports
        if report.get("given"):
            self.file.write_all(content())
        else:
            self._compare(report)
        self.keep()

    def _compare(self, report: Report) -> None:
        """Raise an error if the draft is not what the worker wrote. Its content ends with the
        checksums of what the worker had in memory, which every load verifies, so only the size and
        the end of the file are compared here."""
        # Opened again: another machine's file system may have shown less until the worker closed the file.
        with open(self.temporary, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - END_BYTES, 0))
            end = zlib.crc32(file.read())
        if (size, end) != (report["size"], report["end"]):
            raise CheckpointError(
                f"the draft for {self.path} is not what the worker wrote: it has {size} bytes with the checksum {end:08x}, and "
                f"the worker wrote {report['size']} with {report['end']:08x}. Another program has changed it, or the disk is "
                "faulty. An older file of that name is unchanged; save again"
            )


class SaveHandle:
    """A save in the background. If it fails and the user has not seen the error, the trainer's next
    call raises it."""

    def __init__(self, save: _Save) -> None:
        self.path, self._save = locations.text_of(save.where), save

    def done(self) -> bool:
        return self._save.done.done()

    def result(self, timeout: float | None = None) -> str:
        """Wait until the file is complete and return its path, or raise the error of the save."""
        self.exception(timeout)
        self._save.done.result()
        return self.path

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the save has ended and return its error, or None if it succeeded."""
        error = self._save.done.exception(timeout)
        self._save.seen = self._save.seen or error is not None
        return error

    def end_unopened(self) -> None:
        """Abandon the save if no worker has begun to write: none will, because their call has
        ended."""
        self._save.end_unopened()

    def __repr__(self) -> str:
        state = "running" if not self.done() else "failed" if self._save.done.exception() else "done"
        return f"SaveHandle({str(self._save.where)!r}, {state})"


class _Save:
    """One save. Owns its draft, the transfers over which workers report, and `done`. Only one
    thread gives the draft its name, or drops it. `seen` says whether the user has seen the
    error."""

    def __init__(self, where: locations.Place, make_draft: MakeDraft, engine: Engine, stall_s: float = 0.0) -> None:
        self.where, self._make_draft, self._engine = where, make_draft, engine
        self._draft: DraftOfSave | None = None
        self._stall_s = stall_s or max(engine.limits.hang_s, STALL_AT_LEAST_S)
        self.done: Future[None] = Future()
        self.seen = False
        self._transfers: list[AnyTransfer] = []
        self._claimed = threading.Lock()
        self._progress: Any = None
        self._moved_at = time.monotonic()

    def begin(self, writers: int, *, later: bool) -> dict[str, Any]:
        """Make the arguments for the workers' call, whenever it is made."""
        self._drop()
        self._draft = draft = self._make_draft(self.where)
        self._transfers = [self._engine.group.transfer() for _ in range(writers)]
        return {**draft.arguments, "transfers": [each.name for each in self._transfers], "later": later}

    def moves(self) -> bool:
        """Whether something was written a moment ago: a slow disk does not count as a hang."""
        try:
            progress = [self._draft.size() if self._draft else 0, *(each.moved for each in self._transfers)]
        except OSError as error:
            logger.debug("the draft of a save is not seen: %s", error)
            return False
        if progress != self._progress:
            self._progress, self._moved_at = progress, time.monotonic()
        return time.monotonic() - self._moved_at < MOVES_S

    def complete(self, reports: Sequence[Report]) -> None:
        """Give the draft its name, now that all workers have reported."""
        if not self._claimed.acquire(blocking=False):
            return  # the save was abandoned
        try:
            assert self._draft is not None
            self._draft.complete(reports, lambda: self._transfers[0].data)
        except BaseException as error:
            self._end(error)
            raise
        logger.info("saved the checkpoint %s", self.where)  # before a caller who waits continues
        self._end(None)

    def wait_for_reports(self) -> None:
        """In a thread: complete the save when all workers have reported, unless one has failed or
        nothing moves any more."""
        futures = [each.report for each in self._transfers]
        try:
            while not self.done.done() and not all(each.done() for each in futures):
                concurrent.futures.wait(futures, LOOK_S)
                if not self.moves() and time.monotonic() - self._moved_at > self._stall_s:
                    raise CheckpointError(
                        f"the save to {self.where} was abandoned: it has made no progress for {self._stall_s:g} s. An "
                        "older file of that name is unchanged"
                    )
            reports = [] if self.done.done() else [_report_of(each) for each in futures]
            self.complete(reports)
        except BaseException as error:
            self.close(error)

    def close(self, error: BaseException) -> None:
        """Abandon the save, unless it is complete, or just getting its name."""
        if self._claimed.acquire(blocking=False):
            self._end(error)

    def end_unopened(self) -> None:
        if not any(each.opened for each in self._transfers):
            self.close(WriterFailed("the workers' call has ended before it began"))

    def _end(self, error: BaseException | None) -> None:
        if isinstance(error, OSError) and error.errno:  # the system's, and none of a worker that failed
            error.strerror = f"the save to {self.where} failed: {error.strerror}"
        try:
            self._drop()
        finally:
            if error is None:
                self.done.set_result(None)
            else:
                self.done.set_exception(error)

    def _drop(self) -> None:
        for each in self._transfers:
            each.close()
        if self._draft is not None:
            self._draft.drop()


def _report_of(answer: Future[Report | None]) -> Report:
    """Read what a worker reported about its part. Raise its error."""
    try:
        report = answer.result() or {}
    except ConnectionError as error:
        raise WriterFailed(f"the worker that was sending the checkpoint failed ({error})") from error
    if "error" in report:
        raise CheckpointError(f"the checkpoint could not be written: {report['error']}")
    return report


class Saves:
    """Owns the saves that are still running."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running: list[_Save] = []

    def save(self, path: str | os.PathLike[str], *, blocking: bool = True, watched: bool = False) -> str | SaveHandle:
        """Save to a file. Nothing but the handle raises the errors of a save that is `watched`."""
        where = locations.place_to_save(path)
        return self.write(where, FileDraft, writing.save, lambda: 1, blocking=blocking, watched=watched)

    def write(
        self,
        where: locations.Place,
        make_draft: MakeDraft,
        method: Callable[..., Any],
        writers: Callable[[], int],
        *,
        blocking: bool,
        stall_s: float = 0.0,
        watched: bool = False,
    ) -> str | SaveHandle:
        """Let the workers write a draft with `method`, after earlier saves to the same place. In
        the background, this many of them report."""
        check_flags(blocking=blocking)
        save = _Save(where, make_draft, self._engine, stall_s)
        save.seen = watched
        concurrent.futures.wait([each.done for each in self._running if each.where == where])
        job = Job(
            Call(method),
            prepare=lambda: save.begin(writers(), later=not blocking),
            needs_state=True,
            is_waiting=save.moves,
        )
        try:
            reports = [each for each in self._engine.calls.run(job)[-1].values if each is not None]
            if blocking:
                save.complete(reports)
                return locations.text_of(where)
        except BaseException as error:
            save.close(error)
            raise
        self._running.append(save)
        return self._in_background(save)

    def hand_out(self, path: str | os.PathLike[str]) -> tuple[dict[str, Any], SaveHandle]:
        """Begin a save that the workers make in the middle of a call. Return the arguments of
        `writing.save`. The caller looks for errors."""
        save = _Save(locations.place_to_save(path), FileDraft, self._engine)
        return save.begin(1, later=True), self._in_background(save)

    @staticmethod
    def _in_background(save: _Save) -> SaveHandle:
        threading.Thread(target=save.wait_for_reports, name="raysgd-save", daemon=True).start()
        return SaveHandle(save)

    def content(self) -> Any:
        self.raise_failed()
        return self._engine.calls.run(Job(Call(writing.checkpoint), needs_state=True))[-1].values[0].data

    def raise_failed(self) -> None:
        """Raise the first error of a background save that the user has not seen."""
        failed = self._failed()
        self._running = [save for save in self._running if not save.done.done() or save in failed[1:]]
        for save in failed[:1]:
            save.seen, error = True, save.done.exception()
            raise CheckpointError(f"the save to {save.where} in the background failed: {error}") from error

    def finish(self) -> None:
        """Wait up to 600 s for all running saves together, because the workers are about to end.
        `raise_failed` can raise only one error after that, so the others are logged here."""
        until = time.monotonic() + SHUTDOWN_S
        for save in self._running:
            try:
                save.done.exception(max(until - time.monotonic(), 0.0))
            except concurrent.futures.TimeoutError:
                self._abandon(save, f"it was not complete {SHUTDOWN_S:g} s after shutdown() was called")
        for save in self._failed()[1:]:
            save.seen = True
            logger.error("the save to %s in the background failed: %s", save.where, save.done.exception())

    def abandon(self) -> None:
        """Abandon running saves: the workers end now."""
        for save in self._running:
            if not save.done.done():
                self._abandon(save, "the trainer was shut down by force")

    @staticmethod
    def _abandon(save: _Save, why: str) -> None:
        logger.error(
            "the save to %s in the background was abandoned: %s. An older file of that name is unchanged",
            save.where,
            why,
        )
        save.close(CheckpointError(f"the save was abandoned: {why}"))

    def _failed(self) -> list[_Save]:
        return [save for save in self._running if save.done.done() and save.done.exception() and not save.seen]
