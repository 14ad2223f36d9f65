"""The stream of the late device: a thread that runs what was launched, while the host continues."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable
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
    """A moment of the stream, for which another thread can wait."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def synchronize(self) -> None:
        self.reached.wait()


class Stream:
    """Runs what was launched, one after another, on a thread. Owns the counts and the device's error."""

    def __init__(self) -> None:
        self.launched = self.done = 0
        self.waits: Counter[str] = Counter()
        self._work: Queue[tuple[Callable[[], Any], int]] = Queue(MOST_AHEAD)
        self._running = threading.Event()
        self._error: BaseException | None = None
        self.release()
        threading.Thread(target=self._run, name="late-device", daemon=True).start()

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        while True:
            call, count = self._work.get()
            self._running.wait()
            try:
                if self._error is None or not count:
                    call()
                    self.done += count
            except BaseException as error:
                self._error = error
            del call  # and the memory that it holds

    @_as_torchs
    def launch(self, call: Callable[[], Any], count: int = 1) -> None:
        """Let the device do this later. `count` is the number of launches for which it stands."""
        self._raise_error()
        self.launched += count
        self._work.put((call, count))

    def hold(self) -> None:
        """Stop the device before its next operation, as a kernel of NCCL's does that waits for a peer."""
        self._running.clear()

    def release(self) -> None:
        """Let the device continue."""
        self._running.set()

    def break_down(self) -> None:
        """Launch a kernel that breaks the device: each later launch and wait raises its error."""

        def kernel() -> None:
            raise IndexError("an illegal memory access was encountered")

        self.launch(kernel)

    @_as_torchs
    def wait(self, operation: str) -> None:
        """Wait until the device has done what was launched. Raise its error, if it has one. Count it, unless it is a thread
        of raysgd, for which training does not wait."""
        self.waits[f"{operation} in {_caller()}"] += not threading.current_thread().name.startswith("raysgd")
        reached = threading.Lock()
        reached.acquire()
        self._work.put((reached.release, 0))
        reached.acquire()
        self._raise_error()

    @_as_torchs
    def synchronize(self) -> None:
        self.wait("synchronize")

    def wait_event(self, event: Any) -> None:
        """Do nothing: in one stream, what was launched before has been done before."""

    def record_event(self) -> Event:
        """Return an event that is done when everything is that was launched before it."""
        event = Event()
        self._work.put((event.reached.set, 0))
        return event

    def _raise_error(self) -> None:
        if self._error is not None:
            error: Any = torch.AcceleratorError(f"CUDA error: {self._error}")
            error.error_code = ILLEGAL_ADDRESS
            raise error from self._error


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


class DeviceModule(_DummyBackendModule):
    """What is `torch.late`, as `torch.cuda` is for CUDA. All of its streams are one."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def current_stream(self, device: Any = None) -> Stream:
        return self._stream

    Stream = current_stream

    def stream(self, other: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]
