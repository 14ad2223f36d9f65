"""The streams of the late device: threads that run what was launched, while the host continues."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from queue import Queue
from types import FrameType
from typing import Any

import torch
from torch.utils.backend_registration import _DummyBackendModule

from raysgd.core.hang import PACKAGE

__all__ = ["MOST_AHEAD", "DeviceModule", "Stream"]

HERE = __file__.rpartition("/")[0] + "/late_"
MOST_AHEAD = 1024  # launches that the device has not begun: then the host waits before the next one, as with CUDA
ILLEGAL_ADDRESS = 700  # CUDA's number of this error


def _as_torchs(function: Any) -> Any:
    """Let a stack show a function's frame as one of torch, as those of `torch.cuda` are."""
    function.__code__ = function.__code__.replace(co_filename="/torch/late/streams.py")
    return function


class Event:
    """A moment of a stream, for which other streams and threads can wait. It may be recorded again."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.reached.set()  # as one that was never recorded

    def synchronize(self) -> None:
        self.reached.wait()

    def query(self) -> bool:
        return self.reached.is_set()


class Stream:
    """Runs what was launched, one after another, on a thread. The device's `first` stream owns the counts and the error of
    all of them. What a stream does waits for another one only where an event says so."""

    def __init__(self, first: Stream | None = None) -> None:
        self._first = first or self
        self.launched = self.done = 0
        self.waits: Counter[str] = Counter()
        self.counting = threading.Lock()
        self._work: Queue[tuple[Callable[[], Any], int]] = Queue(MOST_AHEAD)
        self._running = threading.Event()
        self.error: BaseException | None = None
        self.release()
        threading.Thread(target=self._run, name="late-device", daemon=True).start()

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        first = self._first
        while True:
            call, count = self._work.get()
            self._running.wait()
            try:
                if first.error is None or not count:
                    call()
                    with first.counting:
                        first.done += count
            except BaseException as error:
                first.error = error
            del call  # and the memory that it holds

    @_as_torchs
    def launch(self, call: Callable[[], Any], count: int = 1) -> None:
        """Let the device do this later. `count` is the number of launches for which it stands."""
        self._raise_error()
        with self._first.counting:
            self._first.launched += count
        self._work.put((call, count))

    def hold(self) -> None:
        """Stop this stream before its next operation, as a kernel of NCCL's does that waits for a peer."""
        self._running.clear()

    def release(self) -> None:
        """Let this stream continue."""
        self._running.set()

    def break_down(self) -> None:
        """Launch a kernel that breaks the device: each later launch and wait raises its error."""

        def kernel() -> None:
            raise IndexError("an illegal memory access was encountered")

        self.launch(kernel)

    @_as_torchs
    def wait(self, operation: str) -> None:
        """Wait until this stream has done what was launched. Raise the device's error, if it has one. Count it, unless it is
        a thread of raysgd, for which training does not wait."""
        self._first.waits[f"{operation} in {_caller()}"] += not threading.current_thread().name.startswith("raysgd")
        reached = threading.Lock()
        reached.acquire()
        self._work.put((reached.release, 0))
        reached.acquire()
        self._raise_error()

    @_as_torchs
    def synchronize(self) -> None:
        self.wait("synchronize")

    def wait_event(self, event: Event) -> None:
        """Let what is launched from now on wait for the moment at which the event was recorded last."""
        self._work.put((event.reached.wait, 0))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """Return an event that is done when everything is that was launched in this stream before it."""
        event = event or Event()
        event.reached = threading.Event()
        self._work.put((event.reached.set, 0))
        return event

    def _raise_error(self) -> None:
        if (cause := self._first.error) is not None:
            error: Any = torch.AcceleratorError(f"CUDA error: {cause}")
            error.error_code = ILLEGAL_ADDRESS
            raise error from cause


def _caller() -> str:
    """Return the function of raysgd that is running, or else the one that called torch."""
    frame: FrameType | None = sys._getframe(1)
    outside = ""
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if path.startswith(PACKAGE):
            return f"{path.removeprefix(PACKAGE)[1:]} {name}"
        if not outside and "/torch/" not in path and not path.startswith(HERE):
            outside = f"{path.rpartition('/')[2]} {name}"
        frame = frame.f_back
    return outside


AnyStream = Stream  # in a class that has a method of the same name


class DeviceModule(_DummyBackendModule):
    """What is `torch.late`, as `torch.cuda` is for CUDA. Each thread has a current stream."""

    Event = Event
    free = 1 << 29  # bytes, of which nothing is counted

    def __init__(self, first: AnyStream) -> None:
        self._streams, self._current = [first], threading.local()

    def Stream(self, device: Any = None) -> AnyStream:
        self._streams.append(Stream(self._streams[0]))
        return self._streams[-1]

    def current_stream(self, device: Any = None) -> AnyStream:
        found: AnyStream = getattr(self._current, "stream", self._streams[0])
        return found

    @contextlib.contextmanager
    def stream(self, stream: AnyStream) -> Iterator[None]:
        before, self._current.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._current.stream = before

    @_as_torchs
    def synchronize(self, device: Any = None) -> None:
        """Wait for all streams."""
        for each in self._streams[1:]:
            self._streams[0].wait_stream(each)
        self._streams[0].wait("synchronize")

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return self.free, 1 << 30

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]
