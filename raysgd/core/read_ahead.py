"""A thread that reads from an iterator in advance. Both."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

__all__ = ["ReadAhead"]

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """Owns the thread, and at most `ahead` items that were read and not asked for yet."""

    def __init__(self, source: Iterator[T], *, ahead: int, name: str) -> None:
        self._source = source
        self._ready: queue.Queue[Any] = queue.Queue(ahead)
        self._stopped = threading.Event()
        threading.Thread(target=self._read, name=name, daemon=True).start()

    def next(self, timeout: float | None = None) -> T | None:
        """Return the next item, or None at the end. Raise what the iterator has raised, or `queue.Empty` after `timeout`."""
        found = self._ready.get(timeout=timeout)
        if isinstance(found, BaseException):
            raise found
        return found  # type: ignore[no-any-return]

    def stop(self) -> None:
        """Let the thread end after the item that it is reading."""
        self._stopped.set()

    def _read(self) -> None:
        try:
            for item in self._source:
                self._put(item)
                if self._stopped.is_set():
                    break
            self._put(None)
        except BaseException as error:  # `next` raises it
            self._put(error)
        finally:
            if callable(close := getattr(self._source, "close", None)):
                close()  # in this thread, because a generator that is running cannot be closed by another

    def _put(self, item: Any) -> None:
        while not self._stopped.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return
            except queue.Full:
                continue
