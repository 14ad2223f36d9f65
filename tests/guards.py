"""What a test must not leave behind: environment variables, threads, processes and listening sockets.

    before = Inventory.take()
    ...
    leaks = before.leaks()      # [] or ["thread 'raysgd-control'", ...]

An inventory takes less than a millisecond. What is found is looked at again for a few seconds, because threads and
processes need a moment to end.
"""

from __future__ import annotations

import gc
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Guard", "Inventory"]

PATIENCE_S = 15.0
# pytest writes the first one for each phase of each test. The others are set by libraries when they are imported or
# used for the first time, in whichever test that is: TensorFlow with Keras, torch's compiler, W&B (whose service
# process ends with this one), and Ray (which also has many with a prefix of its own). A rank sets the one of gloo for
# its process, which in some tests is this one.
NO_LEAK = {
    "PYTEST_CURRENT_TEST",
    "ENABLE_RUNTIME_UPTIME_TELEMETRY",
    "HDF5_PLUGIN_PATH",
    "KMP_DUPLICATE_LIB_OK",
    "KMP_INIT_AT_FORK",
    "TF2_BEHAVIOR",
    "TPU_ML_PLATFORM",
    "TPU_ML_PLATFORM_VERSION",
    "PYTHONBREAKPOINT",
    "GLOO_DISABLE_CONNECTION_RETRIES",
    "CRC32C_SW_MODE",
    "TORCHINDUCTOR_CACHE_DIR",
    "WANDB_SERVICE",
}
OF_RAY = "RAY_"
# A connection of a worker that a trainer of wider scope has started meanwhile: its control server ends it.
SERVED = "raysgd-bulk"
SERVER = "raysgd-control"


@dataclass(frozen=True)
class Inventory:
    """What exists at one moment. Threads of one name and listening sockets are only counted, because a trainer of wider
    scope may replace its own."""

    environment: dict[str, str]
    threads: frozenset[threading.Thread]
    children: frozenset[int]
    listening: frozenset[int]

    @classmethod
    def take(cls) -> Inventory:
        return cls(
            environment=dict(os.environ),
            threads=frozenset(threading.enumerate()),
            children=frozenset(_children()),
            listening=frozenset(_listening()),
        )

    def including(self, before: Inventory) -> Inventory:
        """Return this inventory with everything that has been added since `before` was taken."""
        now = Inventory.take()
        added = {name: value for name, value in now.environment.items() if before.environment.get(name) != value}
        return Inventory(
            environment={**self.environment, **added},
            threads=self.threads | now.threads - before.threads,
            children=self.children | now.children - before.children,
            listening=self.listening | now.listening - before.listening,
        )

    def leaks(self, *, patience_s: float = PATIENCE_S) -> list[str]:
        """Return a description of everything that exists now and did not when this inventory was taken."""
        found = self._found()
        if found:
            gc.collect()  # an error's traceback may hold the last reference to a socket or a server
        deadline = time.monotonic() + patience_s  # a collection can take seconds in a large process on a busy machine
        while found and time.monotonic() < deadline:
            time.sleep(0.02)
            found = self._found()
        return found

    def _found(self) -> list[str]:
        return [*self._variables(), *self._threads(), *self._processes(), *self._sockets()]

    def _variables(self) -> Iterator[str]:
        now = dict(os.environ)
        for name in sorted({*now, *self.environment} - NO_LEAK):
            if now.get(name) != self.environment.get(name) and not name.startswith(OF_RAY):
                yield f"environment variable {name}={now.get(name)!r}, was {self.environment.get(name)!r}"

    def _threads(self) -> Iterator[str]:
        served = any(thread.name == SERVER for thread in self.threads)
        old = Counter(thread.name for thread in self.threads)
        running = threading.enumerate()
        more = Counter(thread.name for thread in running) - old
        for thread in running:
            ours = thread.name.startswith("raysgd") and not (served and thread.name.startswith(SERVED))
            if thread not in self.threads and more[thread.name] and (ours or not thread.daemon):
                yield f"{'daemon ' if thread.daemon else ''}thread {thread.name!r}"

    def _processes(self) -> Iterator[str]:
        for child in sorted(set(_children()) - self.children):
            command = _command(child)
            if command and "wandb-core" not in command:
                yield f"process {child}: {command:.200}"

    def _sockets(self) -> Iterator[str]:
        now = _listening()
        if len(now) > len(self.listening):
            yield from (f"listening socket at {now[inode]}" for inode in sorted(set(now) - self.listening))


class Guard:
    """A pytest plugin. Owns the inventory from before the test that is running."""

    def __init__(self) -> None:
        self._before: Inventory | None = None

    def begin(self) -> None:
        self._before = Inventory.take()

    def end(self) -> list[str]:
        """Return what the test has left behind."""
        before, self._before = self._before, None
        assert before is not None
        return before.leaks()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        """Do not count what a fixture of wider scope holds that a test asks for while it runs
        (`request.getfixturevalue`)."""
        if fixturedef.scope == "function" or self._before is None:
            return (yield)
        now = Inventory.take()
        try:
            return (yield)
        finally:
            self._before = self._before.including(now)


def _children() -> Iterator[int]:
    """Yield the processes that this one started, without those of `tests/background.py` and of `multiprocessing`
    itself, which outlive a test. Linux lists them by the thread that started them; elsewhere none are found."""
    others = {thread.native_id for thread in threading.enumerate() if thread.name.startswith("scripts")}
    lasting = {
        multiprocessing.resource_tracker._resource_tracker._pid,  # type: ignore[attr-defined]
        multiprocessing.forkserver._forkserver._forkserver_pid,  # type: ignore[attr-defined]
    }
    for task in Path("/proc/self/task").glob("*"):
        if int(task.name) in others:
            continue
        try:
            listed = (task / "children").read_text(encoding="ascii")
        except OSError:  # the thread has ended
            continue
        yield from (pid for pid in map(int, listed.split()) if pid not in lasting)


def _command(pid: int) -> str:
    """Return the command line of a process, and an empty string if it has ended."""
    process = Path("/proc", str(pid))
    try:
        state = (process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
    return "" if state in "ZX" else command or "(no command line)"


def _listening() -> dict[int, str]:
    """Return the address of each TCP socket of this process that accepts connections, by its inode."""
    found = {}
    for name in os.listdir("/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"):
        try:
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                address = _accepting(int(name))
                if address:
                    found[status.st_ino] = address
        except OSError:  # another thread has closed it
            continue
    return found


def _accepting(descriptor: int) -> str:
    opened = socket.socket(fileno=descriptor)
    try:
        internet = opened.family in (socket.AF_INET, socket.AF_INET6)
        if not internet or not opened.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return ""
        return "{}:{}".format(*opened.getsockname())
    finally:
        opened.detach()
