"""Stores things in the order in which they came, on a thread of its own: whoever deals with losses never waits for a disk
or a bucket."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

__all__ = ["Scribe"]

Work = Callable[[], None]


class Scribe:
    """Owns a thread, and what it has still to do. Its first error is told to `fail`, and ends its work.

    `room` bounds how many heavy things wait: whoever brings one more waits, so that memory is bounded too.
    """

    def __init__(self, fail: Callable[[BaseException], None], *, room: int = 2) -> None:
        self._fail = fail
        self._room = threading.Semaphore(room)
        self._work: queue.SimpleQueue[tuple[Work, bool] | None] = queue.SimpleQueue()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name="raysgd-scribe", daemon=True)
        self._thread.start()

    def put(self, work: Work, *, heavy: bool = False) -> None:
        """Returns at once, unless there is no room."""
        if heavy:
            self._room.acquire()
        self._work.put((work, heavy))

    def finish(self) -> BaseException | None:
        """Waits until all is done; the error, if there was one."""
        self._work.put(None)
        self._thread.join()
        return self.error

    def _serve(self) -> None:
        while (item := self._work.get()) is not None:
            work, heavy = item
            try:
                if self.error is None:
                    work()
            except BaseException as error:  # told to those who wait for the run
                self.error = error
                self._fail(error)
            finally:
                if heavy:
                    self._room.release()
