"""Define the Ray actor: a replica host on the main thread, a control client beside it. Worker."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from raysgd.core.channel.connection import ControlAddress
from raysgd.core.channel.messages import PerformCall
from raysgd.core.outcomes import Outcome, WorkerFailed
from raysgd.core.protocols import ProcessGroupBackend
from raysgd.storage.durable import own_folder
from raysgd.workers.calls import unpickle_parts
from raysgd.workers.cluster.keeper import WorkerTenure
from raysgd.workers.control_client import ControlClient
from raysgd.workers.gpu_faults import find_fault
from raysgd.workers.orphan import NamedHost
from raysgd.workers.replica_host import ReplicaHost

PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3  # options of glibc's `mallopt`
KEPT_BYTES, GROWTH_BYTES, LARGEST_KEPT_BYTES = 256 << 20, 16 << 20, 32 << 20
# The driver makes Ray end a worker that it dismissed, which takes milliseconds, unless Ray is no longer running.
LEAVE_S = 3.0
WITNESS_S = 1.0
DRIVER_GONE, GPU_BROKEN = 78, 79
PEERS_LEAVE_S = 1.0


class WorkerActor:
    """One worker process. Its methods run one at a time on the main thread, which data loaders,
    signal handlers and user code require; so `max_concurrency` must be 1."""

    def __init__(
        self, worker: str, address: ControlAddress, backend: ProcessGroupBackend, tenure: WorkerTenure | None = None
    ) -> None:
        import ray

        if tenure is not None and not tenure.enlist(worker):
            os._exit(0)  # another driver has taken over since this process was launched
        here = ray.get_runtime_context()
        node, gpus = here.get_node_id(), here.get_accelerator_ids().get("GPU", ())
        self._worker, self._tenure = worker, tenure
        self._term, orphan_s = (0, 0.0) if tenure is None else (tenure.term, tenure.orphan_s)
        try:
            ways = backend.abort, _leave, _end_orphan
            self._client = ControlClient(address, worker, node, *ways, orphan_s=orphan_s, gpus=gpus)
        except OSError:
            if tenure is not None:
                self._driver_ended()
            raise
        self._host = (ReplicaHost if tenure is None else NamedHost)(backend, self._client.control)
        self._host.find_fault = find_fault
        self._client.holds_state = lambda: self._host.holds_state
        if tenure is not None:
            self._client.on_driver_ended = self._driver_ended
        signal.signal(signal.SIGTERM, self._on_sigterm)
        _use_the_assigned_threads()
        _keep_freed_memory()
        _share_temporary_folder()
        _end_forks_with_this_process()

    def adopt(self, address: ControlAddress, term: int) -> None:
        """Leave the driver, and connect to the one of a newer term."""
        assert self._tenure is not None
        tenure = replace(self._tenure, term=term)
        if term <= self._term or not tenure.enlist(self._worker):
            raise RuntimeError(f"a worker of term {self._term} cannot be taken over in term {term}")
        self._client.connect(address)
        self._term = term

    def _driver_ended(self) -> None:
        """Tell the keeper of the lease. If Ray does not answer, continue without."""
        assert self._tenure is not None
        thread = threading.Thread(target=self._tenure.witness, args=(self._term,), daemon=True)
        thread.start()
        thread.join(timeout=WITNESS_S)

    def serve(self, term: int = 0) -> None:
        """Perform calls from the control connection, until it ends."""
        driver = self._client.driver
        while term == self._term and not driver.has_ended and isinstance(message := driver.calls.get(), PerformCall):
            if driver.has_ended:
                return  # no driver would get the answer
            outcome = self._perform(message)
            if not driver.has_ended:
                lost = self._host.try_move(partial(self._client.answer, message.call, outcome))
                if lost is not None:  # a large answer, on a connection of its own
                    self._client.answer(message.call, lost)
            if isinstance(outcome, WorkerFailed):  # an orderly end could wait for the GPU
                _remove_temporary_folder()
                # Until the driver has interrupted the peers: gloo may forget what they receive when a connection ends.
                time.sleep(PEERS_LEAVE_S)
                os._exit(GPU_BROKEN)

    def _perform(self, message: PerformCall) -> Outcome:
        self._client.begin(message.call)
        take, large = self._client.control.take, list[Any]()
        if (ended := self._host.try_move(lambda: large.extend(map(take, message.transfers)))) is not None:
            return ended
        verb, arguments = unpickle_parts(message.packed, large)
        if verb in ("join", "warm"):
            self._client.generation = message.generation
        return self._host.perform(verb, arguments)

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        """Report a preemption notice to the driver. A second SIGTERM ends the process."""
        if self._client.control.notice:
            os._exit(128 + signum)
        self._client.notice()


def _use_the_assigned_threads() -> None:
    """Let torch use as many threads as Ray has assigned, if torch read that variable before Ray set
    it: a forked worker has imported it already."""
    torch, threads = sys.modules.get("torch"), os.environ.get("OMP_NUM_THREADS", "")
    if torch is not None and threads.isdecimal() and int(threads) > 0:
        torch.set_num_threads(int(threads))


def _keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next step, unless the user has set options for it. By
    default, it may return memory after a step, and get a thousand pages again in the next one of a
    small ResNet, which takes some milliseconds."""
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ) or sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(M_TOP_PAD, GROWTH_BYTES)
        mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)


def _share_temporary_folder() -> None:
    """Let data-loader processes keep the sockets of `multiprocessing` in one folder. Otherwise each
    creates its own, which stays if that process is killed."""
    process = multiprocessing.current_process()
    process._config = _SharedSettings(process._config)  # type: ignore[attr-defined]


class _SharedSettings(dict[str, Any]):
    """The settings of `multiprocessing`, of which a new process makes a copy, and the folder."""

    def copy(self) -> dict[str, Any]:
        if self.get("tempdir") is None:
            self["tempdir"] = str(own_folder(Path(tempfile.gettempdir()), "raysgd-worker"))
        return dict(self)


def _remove_temporary_folder() -> None:
    """Remove that folder: this process and its data-loader processes are about to be killed."""
    folder = multiprocessing.current_process()._config.get("tempdir")  # type: ignore[attr-defined]
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def _end_forks_with_this_process() -> None:
    """Make processes that are forked from this one end when it is killed. Call this once, on the
    main thread.

    Forked data-loader processes hold copies of the worker's sockets. If they outlived a killed
    worker, its peers would not see these sockets close. Linux can send a signal when the parent
    ends, but its parent is the *thread* that forked:

        main thread    ends only with the process, so the signal is SIGKILL
        other threads  the signal is one that programs ignore by default; its handler ends the process only if the
                       worker has ended. Otherwise Linux makes another thread the parent, and signals when that one ends
    """
    main, forking = threading.get_ident(), threading.local()

    def before() -> None:
        forking.parent = os.getpid()
        # Python drops the signals that a new process receives before its `after_in_child`.
        forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def in_parent() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, forking.mask)

    def in_child() -> None:
        end_with_parent()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the worker's handler treats it as a preemption notice
        signal.pthread_sigmask(signal.SIG_SETMASK, forking.mask)

    def end_with_parent() -> None:
        if sys.platform != "linux":
            return
        parent = forking.parent

        def end_if_orphaned(*_: Any) -> None:
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGKILL)

        ending = signal.SIGKILL
        if threading.get_ident() != main:  # the only thread of the new process has the id of the thread that forked
            ending = signal.SIGURG
            signal.signal(ending, end_if_orphaned)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ending)
        end_if_orphaned()  # the parent may have ended before `prctl` was called

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)


def _leave() -> None:
    """End this process if Ray does not: the driver no longer needs it, and cannot reach it."""
    _remove_temporary_folder()
    time.sleep(LEAVE_S)
    os._exit(0)


def _end_orphan() -> None:
    _remove_temporary_folder()
    os._exit(DRIVER_GONE)  # the main thread may be stuck in a collective
