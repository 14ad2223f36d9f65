"""Stores things in the order in which they came, on a thread of its own: whoever deals with losses never waits for a disk
or a bucket."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from raysgd.errors import CheckpointError

__all__ = ["Scribe"]

Work = Callable[[], None]

# For each thing that is stored. A store that takes nothing at all for 600 s is an error before that (`remote`).
LIMIT_S = 3600.0
LOOK_S = 1.0


class Scribe:
    """Owns a thread, and what it has still to do. Its first error is told to `fail`, and ends its work.

    `room` bounds how many heavy things wait: whoever brings one more waits, so that memory is bounded too. All waits end
    when nothing was stored for LIMIT_S.
    """

    def __init__(self, fail: Callable[[BaseException], None], *, room: int = 2) -> None:
        self._fail = fail
        self._room = threading.Semaphore(room)
        self._work: queue.SimpleQueue[tuple[Work, bool] | None] = queue.SimpleQueue()
        self._began_at: float | None = None  # what it is storing now
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="raysgd-scribe", daemon=True)
        self._thread.start()

    def put(self, work: Work, *, heavy: bool = False) -> None:
        """Returns at once, unless there is no room."""
        if heavy:
            self._wait(lambda seconds: self._room.acquire(timeout=seconds))
        self._work.put((work, heavy))

    def finish(self) -> BaseException | None:
        """Waits until all is done; the error, if there was one."""
        self._work.put(None)
        try:
            self._wait(self._ended)
        except CheckpointError as error:
            self.error = self.error or error
        return self.error

    def _ended(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _wait(self, until: Callable[[float], bool]) -> None:
        while not until(min(LOOK_S, LIMIT_S)):
            began = self._began_at
            if began is not None and time.monotonic() - began > LIMIT_S:
                raise CheckpointError(
                    f"a checkpoint could not be stored within {LIMIT_S:g} s, and is not waited for any more. It is incomplete, "
                    "and so not there for readers; what was stored before it is unharmed"
                )

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            work, heavy = item
            self._began_at = time.monotonic()
            try:
                if self.error is None:
                    work()
            except BaseException as error:  # told to those who wait for the run
                self.error = error
                self._fail(error)
            finally:
                self._began_at = None
                if heavy:
                    self._room.release()
