"""Iterate data loaders, and find out when a process of one was killed. Worker.

torch reports such a death by an exception from its handler of SIGCHLD, and so wherever the main thread happens to be:
also between the updates of two parameters. Here that exception is let through only where a batch is waited for, and it
becomes a `DataLoaderFailure`, from which training goes on with a new loader.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType, TracebackType
from typing import Any

from torch.utils.data import dataloader as torch_loader

from raysgd.core.outcomes import DataLoaderFailure
from raysgd.torch.foreign import (
    end_processes,
    forget_iterator,
    is_loaders_signal_handler,
    live_iterator,
    processes_of,
)

__all__ = ["LoaderIterator"]

END_S = 1.0
DYING_S = 1.0
HINTS = {
    signal.SIGKILL: "the system does this when memory runs out",
    signal.SIGBUS: "the shared memory (/dev/shm) is usually too small then",
    signal.SIGSEGV: "a crash in native code",
}


class LoaderIterator:
    """Owns one pass over a loader. Raise `DataLoaderFailure` when a process of the loader died, after ending the other
    ones: the next pass begins with new processes. What the data set or the loader raises itself is left alone."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._live: Any = live_iterator(loader)  # whose processes persist from one pass to the next
        self._live = self._guarded(lambda: iter(loader))
        _delay_reports()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._guarded(lambda: next(self._live))

    def _guarded(self, step: Callable[[], Any]) -> Any:
        cause: Exception | None = None
        broken = self._live
        if not _dead(broken):
            try:
                return step()
            except StopIteration:
                raise
            except Exception as error:
                if "in DataLoader worker process" in str(error):  # the data set raised it there
                    raise
                broken = _broken(error)
                if broken is None:
                    raise
                cause = error
        told = "; ".join(_described(process) for process in _dead(broken))
        if live_iterator(self._loader) is broken:
            forget_iterator(self._loader)
        _end(broken)
        raise DataLoaderFailure(told) from cause


def _dead(iterator: Any) -> list[Any]:
    """The processes of an iterator that did not end by themselves."""
    return [process for process in processes_of(iterator) if process.exitcode not in (None, 0)]


def _broken(error: Exception) -> Any:
    """The torch iterator that an exception came through, if a process of it died. A process that is being killed closes
    its connections, on which batches come, some milliseconds before it is dead."""
    for iterator in _iterators_in(error.__traceback__):
        until = time.monotonic() + DYING_S
        while processes_of(iterator):
            if _dead(iterator):
                return iterator
            if time.monotonic() > until:
                break
            time.sleep(0.01)
    return None


def _described(process: Any) -> str:
    code = process.exitcode
    if code > 0:
        return f"loader process {process.pid} ended with exit code {code}"
    hint = HINTS.get(-code)
    return f"loader process {process.pid} was killed by {signal.Signals(-code).name}{f' ({hint})' if hint else ''}"


def _end(iterator: Any) -> None:
    """Ends what is left of a broken iterator. Locks that the dead process held may never be free again, and torch's own
    end of an iterator can wait for one of them, so it gets a thread of its own."""
    for process in processes_of(iterator):
        process.kill()
    ender = threading.Thread(target=end_processes, args=(iterator,), name="raysgd-loader-end", daemon=True)
    ender.start()
    ender.join(END_S)


def _iterators_in(trace: TracebackType | None) -> Iterator[Any]:
    """The iterators of torch that an exception came through. Iterables of the user's can have loaders inside them."""
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == torch_loader.__file__:
            yield trace.tb_frame.f_locals.get("self")
        trace = trace.tb_next


def _delay_reports() -> None:
    """Wraps torch's handler of SIGCHLD, once it is there. A death that it may not report where the main thread is now
    is found when the loader is asked for its next batch."""
    handler: Any = signal.getsignal(signal.SIGCHLD)
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or not is_loaders_signal_handler(handler):
        return

    def delayed(number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except RuntimeError:
            if _waits(frame):
                raise

    signal.signal(signal.SIGCHLD, delayed)


def _waits(frame: FrameType | None) -> bool:
    """Is a loader at work here that lost a process?"""
    while frame is not None:
        if frame.f_code.co_filename == torch_loader.__file__ and _dead(frame.f_locals.get("self")):
            return True
        frame = frame.f_back
    return False
