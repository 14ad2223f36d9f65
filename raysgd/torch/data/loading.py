"""Iterate over data loaders, and find out when one of a loader's processes has ended. Worker.

torch reports such a death with an exception from its SIGCHLD handler, so it can be raised wherever
the main thread is, even between the updates of two parameters. This module lets that exception
through only while a loader is waiting for a batch, and raises a `DataLoaderFailure` for it.
Training then continues with a new loader.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any

from torch.utils.data import dataloader as torch_loader

from raysgd.core.outcomes import DataLoaderFailure
from raysgd.errors import text_of
from raysgd.torch import foreign

END_S = 1.0
DYING_S, OTHER_S = 10.0, 1.0  # after an error of a connection, and after another one
HINTS = {
    signal.SIGKILL: "the system does this when memory runs out",
    signal.SIGBUS: "the shared memory (/dev/shm) is usually too small then",
    signal.SIGSEGV: "a crash in native code",
}
EXITED = (
    "Code that it ran (the data set, a transform, the collate_fn or the worker_init_fn) called sys.exit() or os._exit(), or raised an "
    "error that is not an Exception, such as KeyboardInterrupt, which torch does not pass on. A traceback, if there is one, is in the "
    "output of this worker. raysgd treats this as an error of that code, and does not retry it. Raise an Exception there"
)


class LoaderIterator:
    """Owns one pass over a loader. If a process of the loader was killed, ends the other ones and
    raises `DataLoaderFailure`; the next pass starts new processes. If one has ended by itself, the
    user's code made it do so, so a RuntimeError is raised instead. Errors of the data set or the
    loader itself are raised unchanged."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._live: Any = foreign.live_iterator(loader)  # its processes persist from one pass to the next
        if lost := foreign.lost_processes(self._live):
            failure = self._failed(self._live)
            if not _have_exited(lost):  # otherwise Ctrl-C has reached them, too, and no pass needs their batches
                raise failure
            self._live = None
        self._has_processes = bool(foreign.processes_of(self._live))
        try:
            self._live = foreign.begin_pass(loader)
        except Exception as error:
            self._explain(error)
            raise
        self._has_processes = bool(foreign.processes_of(self._live))
        try:
            _delay_reports()
        except RuntimeError:  # torch's handler was not wrapped yet; the next batch shows which process has ended
            _delay_reports()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._has_processes and foreign.lost_processes(self._live):
            raise self._failed(self._live)
        try:
            return next(self._live)
        except StopIteration:
            raise
        except Exception as error:
            self._explain(error)
            raise

    def keep(self) -> None:
        """Let the same processes make the loader's next pass."""
        foreign.keep_iterator(self._loader, self._live)

    def close(self) -> None:
        """End the processes, unless they persist to the next pass. Whoever keeps this object, such
        as a traceback, would keep them, and a copy of torch's iterator in processes that are forked
        later, which prints an error there when it is collected."""
        if self._has_processes and self._live is not foreign.live_iterator(self._loader):
            _clean_up(self._live)

    def _explain(self, error: Exception) -> None:
        """Raise another error if the end of a loader process, even a nested one, caused this."""
        if "in DataLoader worker process" in text_of(error):  # the data set raised it there
            return
        broken = _broken(error)
        if broken is not None:
            raise self._failed(broken) from error

    def _failed(self, broken: Any) -> BaseException:
        """End the iterator of which a process has ended, and return the error about it."""
        lost = foreign.lost_processes(broken)
        reason = "; ".join(_described(process) for process in lost)
        if foreign.live_iterator(self._loader) is broken:
            foreign.forget_iterator(self._loader)
        _end(broken)
        return RuntimeError(f"{reason}. {EXITED}") if _have_exited(lost) else DataLoaderFailure(reason)


def _have_exited(processes: Sequence[Any]) -> bool:
    """Whether processes have ended, and none of them was killed."""
    return bool(processes) and all(process.exitcode >= 0 for process in processes)


def _broken(error: Exception) -> Any:
    """Find the torch iterator in the exception's traceback of which a process died, or None. A
    process that is being killed closes the connections for its batches some milliseconds before it
    is dead, so this waits for it."""
    iterators = list(_iterators_in(error.__traceback__))
    until = time.monotonic() + (DYING_S if isinstance(error, ConnectionError | EOFError) else OTHER_S)
    while any(map(foreign.processes_of, iterators)):
        broken = next(filter(foreign.lost_processes, iterators), None)
        if broken is not None or time.monotonic() > until:
            return broken
        time.sleep(0.01)
    return None


def _described(process: Any) -> str:
    code = process.exitcode
    if code >= 0:
        return f"loader process {process.pid} ended with exit code {code}"
    hint = HINTS.get(-code)
    return f"loader process {process.pid} was killed by {signal.Signals(-code).name}{f' ({hint})' if hint else ''}"


def end_iterators_of(error: BaseException) -> None:
    """End the loader processes of all torch iterators in the exception's traceback. Whoever keeps
    the exception would keep the iterators, too."""
    for iterator in list(_iterators_in(error.__traceback__)):
        _clean_up(iterator)


def _end(iterator: Any) -> None:
    """End the remaining processes of a broken iterator."""
    for process in foreign.processes_of(iterator):
        process.kill()
    _clean_up(iterator)


def _clean_up(iterator: Any) -> None:
    """Let torch end an iterator's processes. A dead process may have held locks that are never
    released, and torch can wait for one of them, so this runs in a thread."""
    ender = threading.Thread(target=foreign.end_processes, args=(iterator,), name="raysgd-loader-end", daemon=True)
    ender.start()
    ender.join(END_S)


def _iterators_in(trace: TracebackType | None) -> Iterator[Any]:
    """Yield the torch iterators in a traceback. A user's iterable can have loaders inside it."""
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == torch_loader.__file__:
            yield trace.tb_frame.f_locals.get("self")
        trace = trace.tb_next


def _delay_reports() -> None:
    """Wrap torch's SIGCHLD handler once it is installed. A death that it must not report where the
    main thread is now is found when the loader is asked for its next batch."""
    handler: Any = signal.getsignal(signal.SIGCHLD)
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or not foreign.is_loaders_signal_handler(handler):
        return

    def delayed(number: int, frame: FrameType | None) -> None:
        try:
            handler(number, frame)
        except RuntimeError:
            if _waits(frame):
                raise

    signal.signal(signal.SIGCHLD, delayed)


def _waits(frame: FrameType | None) -> bool:
    """Whether a loader that has lost a process runs in this frame or a caller."""
    while frame is not None:
        if frame.f_code.co_filename == torch_loader.__file__ and foreign.lost_processes(frame.f_locals.get("self")):
            return True
        frame = frame.f_back
    return False
