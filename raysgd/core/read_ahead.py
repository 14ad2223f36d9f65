"""A thread that reads from an iterator in advance. Both."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """Owns at most `ahead` items that were read and not asked for yet, and the thread that reads
    them. It ends after `stop`, and when nothing refers to this object any more."""

    def __init__(self, source: Iterator[T], *, ahead: int, name: str) -> None:
        self._ready: queue.Queue[Any] = queue.Queue(ahead)
        self._stopped = threading.Event()
        args = (source, self._ready, self._stopped)  # not this object, because a running thread would keep it alive
        threading.Thread(target=_read, args=args, name=name, daemon=True).start()
        weakref.finalize(self, self._stopped.set)

    def next(self) -> T | None:
        """Take the next item, None at the end, or raise the iterator's error."""
        item = self._ready.get()
        if isinstance(item, BaseException):
            raise item
        return item  # type: ignore[no-any-return]

    def stop(self) -> None:
        """Let the thread end after the item that it is reading, and now if it waits for room."""
        self._stopped.set()
        with suppress(queue.Empty):
            while True:
                self._ready.get_nowait()


def _read(source: Iterator[Any], ready: queue.Queue[Any], stopped: threading.Event) -> None:
    try:
        for item in source:
            _put(item, ready, stopped)
            if stopped.is_set():
                break
        _put(None, ready, stopped)
    except BaseException as error:  # `next` raises it
        _put(error, ready, stopped)
    finally:
        if callable(close := getattr(source, "close", None)):
            close()  # in this thread, because a generator that is running cannot be closed by another


def _put(item: Any, ready: queue.Queue[Any], stopped: threading.Event) -> None:
    while not stopped.is_set():
        with suppress(queue.Full):
            ready.put(item, timeout=0.1)
            return
