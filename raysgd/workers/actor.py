"""The Ray actor: a body on the process's main thread, and a line beside it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

from raysgd.outcomes import Failed, Ok, Outcome
from raysgd.protocols import Backend
from raysgd.workers.body import Body
from raysgd.workers.line import Line, LineAddress

__all__ = ["WorkerActor"]

PR_SET_PDEATHSIG = 1
# The driver has Ray end a worker that it dismissed, which takes milliseconds. Ray can be gone, though.
LEAVE_S = 3.0


class WorkerActor:
    """One worker process. Its methods run one at a time on the main thread (so must `max_concurrency=1`):
    data loaders, signal handlers and user code expect that."""

    def __init__(self, worker: str, address: LineAddress, backend: Backend) -> None:
        import ray

        node = ray.get_runtime_context().get_node_id()
        self._line = Line(address, worker, node, backend.abort, _leave)
        self._body = Body(backend, self._line.control)
        self._line.control.upload = self._line.upload
        self._line.control.deliver = self._line.deliver
        signal.signal(signal.SIGTERM, self._on_sigterm)
        os.register_at_fork(after_in_child=_die_with_parent)

    def perform(self, call: int, generation: int, verb: str, arguments: dict[str, Any]) -> Outcome:
        import ray

        self._line.begin(call)
        if verb in ("join", "warm"):
            self._line.generation = generation
        fetched = {
            name: ray.get(value) if isinstance(value, ray.ObjectRef) else value for name, value in arguments.items()
        }
        return self._body.perform(verb, fetched)

    def value(self, verb: str, arguments: dict[str, Any]) -> Any:
        """Like `perform`, for people who hold Ray's references themselves: the value, or the error."""
        outcome = self._body.perform(verb, arguments)
        if isinstance(outcome, Ok):
            return outcome.value
        raise outcome.error if isinstance(outcome, Failed) else RuntimeError(f"the call was cut short: {outcome}")

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        """A preemption notice: say so, finish the batch, let the driver move the work. The second one ends it."""
        if self._line.control.notice:
            os._exit(128 + signum)
        self._line.notice()


def _leave() -> None:
    """End this process, if nobody else does: the driver does not need it any more, and cannot reach it."""
    time.sleep(LEAVE_S)
    os._exit(0)


def _die_with_parent() -> None:
    """Forked data-loader processes hold copies of the worker's sockets: should it be killed, they must go too,
    or its peers would not see those sockets close."""
    if sys.platform == "linux" and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
