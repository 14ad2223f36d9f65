"""The Ray actor: a body on the process's main thread, and a line beside it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from raysgd.durable import own_folder
from raysgd.outcomes import Failed, Ok, Outcome
from raysgd.protocols import Backend
from raysgd.workers.body import Body
from raysgd.workers.line import Line, LineAddress

__all__ = ["WorkerActor"]

PR_SET_PDEATHSIG = 1


class WorkerActor:
    """One worker process. Its methods run one at a time on the main thread (so must `max_concurrency=1`):
    data loaders, signal handlers and user code expect that."""

    def __init__(self, worker: str, address: LineAddress, backend: Backend) -> None:
        import ray

        node = ray.get_runtime_context().get_node_id()
        self._line = Line(address, worker, node, backend.abort)
        self._body = Body(backend, self._line.control)
        self._line.control.upload = self._line.upload
        self._line.control.deliver = self._line.deliver
        signal.signal(signal.SIGTERM, self._on_sigterm)
        os.register_at_fork(after_in_child=_die_with_parent)
        os.register_at_fork(before=_share_temporary_folder)
        self._line.on_end = _remove_temporary_folder

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


def _share_temporary_folder() -> None:
    """Give this process the folder in which `multiprocessing` keeps its sockets; its data-loader processes inherit it. Without
    it each of them makes one, which Python removes only if that process is not killed."""
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    if config.get("tempdir") is None:
        config["tempdir"] = str(own_folder(Path(tempfile.gettempdir()), "raysgd-worker"))


def _remove_temporary_folder() -> None:
    """Remove that folder: this process is about to be killed, and its data-loader processes with it."""
    folder = multiprocessing.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def _die_with_parent() -> None:
    """Forked data-loader processes hold copies of the worker's sockets: should it be killed, they must go too,
    or its peers would not see those sockets close."""
    if sys.platform == "linux" and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
