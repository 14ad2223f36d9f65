"""The guard detects each kind of leak, and allows what ends by itself."""

import multiprocessing
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.guards import Inventory


@contextmanager
def variable() -> Iterator[str]:
    os.environ["RAYSGD_LEAKED"] = "1"
    yield "environment variable RAYSGD_LEAKED='1', was None"
    del os.environ["RAYSGD_LEAKED"]


@contextmanager
def thread(**arguments: Any) -> Iterator[str]:
    done = threading.Event()
    started = threading.Thread(target=done.wait, **arguments)
    started.start()
    yield f"thread {started.name!r}"
    done.set()
    started.join()


@contextmanager
def process() -> Iterator[str]:
    started = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield f"process {started.pid}:"
    started.communicate()


@contextmanager
def listener() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as opened:
        yield f"listening socket at 127.0.0.1:{opened.getsockname()[1]}"


LEAKS: dict[str, Callable[[], Any]] = {
    "variable": variable,
    "thread": thread,
    "thread of raysgd": lambda: thread(daemon=True, name="raysgd-leaked"),
    "process": process,
    "listening socket": listener,
}


@pytest.mark.parametrize("leak", LEAKS.values(), ids=LEAKS)
def test_a_leak_is_described(leak: Callable[[], Any]) -> None:
    before = Inventory.take()
    with leak() as expected:
        (found,) = before.leaks(patience_s=0.05)
        assert expected in found
        assert before.including(before).leaks() == [], "what a fixture of wider scope holds is no leak"
    assert before.leaks() == []


def test_a_thread_that_ends_by_itself_is_no_leak() -> None:
    before = Inventory.take()
    threading.Timer(0.1, lambda: None).start()
    sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.1)"])
    assert before.leaks() == []
    sleeping.wait()


def test_other_threads_connections_and_the_process_of_multiprocessing_are_no_leaks() -> None:
    before = Inventory.take()
    locked = multiprocessing.get_context("spawn").Lock()  # starts the process that deletes leaked locks
    with (
        thread(daemon=True, name="another library"),
        socket.socket() as client,
        socket.create_server(("127.0.0.1", 0)) as own,
    ):
        during = Inventory.take()
        client.connect(own.getsockname())
        assert during.leaks() == []
    assert locked and before.leaks() == []


def test_a_trainer_of_wider_scope_may_replace_its_threads_and_sockets() -> None:
    with thread(daemon=True, name="raysgd-control"), listener():
        before = Inventory.take()
    with thread(daemon=True, name="raysgd-control"), listener():
        assert before.leaks() == []
        with thread(daemon=True, name="raysgd-control"):
            assert len(before.leaks(patience_s=0.05)) >= 1


def test_a_server_may_open_connections_for_workers_that_are_started_during_a_test() -> None:
    with thread(daemon=True, name="raysgd-control"):
        before = Inventory.take()
        with thread(daemon=True, name="raysgd-bulk-1"):
            assert before.leaks() == []
    before = Inventory.take()
    with thread(daemon=True, name="raysgd-bulk-1"):
        assert len(before.leaks(patience_s=0.05)) == 1
