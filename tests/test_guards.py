"""The guard detects each kind of leak, and allows what a trainer of wider scope replaces."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from tests.guards import Inventory


@contextmanager
def thread(name: str) -> Iterator[str]:
    done = threading.Event()
    started = threading.Thread(target=done.wait, name=name, daemon=True)
    started.start()
    yield f"thread {name!r}"
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


def test_each_kind_of_leak_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Inventory.take()
    with ExitStack() as leaks, monkeypatch.context() as patch:
        patch.setenv("RAYSGD_LEAKED", "1")
        expected = [leaks.enter_context(each) for each in (thread("raysgd-leaked"), process(), listener())]
        found = before.leaks(patience_s=0.05)
        assert len(found) == 4
        for text in ("environment variable RAYSGD_LEAKED='1', was None", *expected):
            assert any(text in each for each in found), text
        assert before.including(before).leaks() == [], "what a fixture of wider scope holds is no leak"
    assert "RAYSGD_LEAKED" not in os.environ and before.leaks() == []


def test_a_trainer_of_wider_scope_may_replace_its_threads_and_sockets() -> None:
    with thread("raysgd-control"), listener():
        before = Inventory.take()
    with thread("raysgd-control"), thread("another library"), listener():
        assert before.leaks() == []
        with thread("raysgd-control"):
            assert len(before.leaks(patience_s=0.05)) >= 1
