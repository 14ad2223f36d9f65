"""Snapshots are uploaded on one thread: the newest always, and older ones only if there is time."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from raysgd.core.channel.messages import SnapshotUpload
from raysgd.core.control import Control
from raysgd.core.measures.metrics import Measured
from raysgd.core.measures.progress import Progress
from raysgd.replica import snapshots
from raysgd.replica.snapshots import Snapshotter


class Driver:
    """Receives uploads, each after `allow` was called once for it."""

    def __init__(self) -> None:
        self.allowed, self.begun = threading.Semaphore(0), threading.Semaphore(0)
        self.received: list[tuple[int, bytes]] = []
        self.control = Control(lambda *report: None)
        self.control.upload = self.upload
        self.fails = False

    def upload(self, message: SnapshotUpload, *content: Any) -> None:
        self.begun.release()
        self.allowed.acquire()
        if self.fails:
            raise ConnectionError("the driver has ended")
        self.received.append((message.call, b"".join(content)))


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def uploads(driver: Driver) -> Iterator[Snapshotter]:
    uploads = Snapshotter("epoch", driver.control)
    yield uploads
    for _ in range(10):
        driver.allowed.release()
    uploads.close()


class Copied:
    """Content of this size, which is packed when the `gate` is open."""

    def __init__(self, size: int, gate: threading.Event | None = None) -> None:
        self.size, self._gate = size + 1, gate
        self.released = False

    def __enter__(self) -> list[bytes]:
        if self._gate is not None:
            assert self._gate.wait(60)
        return [b"x" * (self.size - 1), b"y"]

    def __exit__(self, *error: object) -> None:
        self.released = True


def send(uploads: Snapshotter, call: int, size: int = 1, gate: threading.Event | None = None) -> Copied:
    content = Copied(size, gate)
    uploads.send(SnapshotUpload(Progress(), call), Measured, content, content.size)
    return content


def test_training_does_not_wait_and_the_newest_is_uploaded_after_the_first(
    driver: Driver, uploads: Snapshotter
) -> None:
    send(uploads, 1)
    driver.begun.acquire()
    for call in (2, 3, 4):
        assert uploads.has_room(waits=False)
        send(uploads, call)
    driver.allowed.release(2)
    uploads.wait()
    assert driver.received == [(1, b"xy"), (4, b"xy")]


def test_a_large_one_is_waited_for_before_the_next_is_taken(driver: Driver, uploads: Snapshotter) -> None:
    send(uploads, 1, size=snapshots.SMALL)
    driver.begun.acquire()
    waited = threading.Thread(target=uploads.has_room, kwargs={"waits": True})
    waited.start()
    waited.join(0.1)
    assert waited.is_alive()
    driver.allowed.release()
    waited.join(60)
    assert not waited.is_alive() and len(driver.received) == 1


def test_one_in_the_middle_of_an_epoch_is_left_out_if_a_large_one_is_still_being_sent(
    driver: Driver, uploads: Snapshotter, caplog: pytest.LogCaptureFixture
) -> None:
    """No step waits for that, also not while it is still being packed."""
    gate = threading.Event()
    content = send(uploads, 1, size=snapshots.SMALL, gate=gate)
    began = time.monotonic()
    assert not uploads.has_room(waits=False)
    gate.set()
    driver.begun.acquire()
    assert not uploads.has_room(waits=False) and time.monotonic() - began < 1.0
    assert caplog.text.count("a snapshot in the middle of an epoch was left out") == 1 and not content.released
    driver.allowed.release()
    uploads.wait()
    assert uploads.has_room(waits=False) and content.released


def test_a_wait_has_a_limit_and_one_thread_serves_all(driver: Driver, uploads: Snapshotter) -> None:
    uploads.wait()  # nothing was sent
    for call in (1, 2, 3):
        send(uploads, call)
        first = uploads._thread
        driver.begun.acquire()
        uploads.wait(0.01)
        assert len(driver.received) == call - 1
        driver.allowed.release()
        uploads.wait(60)
        assert len(driver.received) == call and uploads._thread is first


def test_the_newest_is_uploaded_after_one_that_has_failed(
    driver: Driver, uploads: Snapshotter, caplog: pytest.LogCaptureFixture
) -> None:
    driver.fails = True
    send(uploads, 1, size=snapshots.SMALL)
    driver.begun.acquire()
    send(uploads, 2)
    driver.allowed.release()
    driver.begun.acquire()
    assert "a snapshot could not be sent to the driver: ConnectionError" in caplog.text
    driver.fails = False
    driver.allowed.release()
    uploads.wait(60)
    assert driver.received == [(2, b"xy")]


def test_a_rank_that_joins_later_takes_its_snapshots_when_the_others_do(driver: Driver) -> None:
    old, new = Snapshotter(4, driver.control), Snapshotter(4, driver.control)
    assert [old.due_after_batch(step, before=step - 1) for step in range(1, 6)] == [False, False, False, True, False]
    assert [each.due_after_batch(6, before=5) for each in (old, new)] == [False, False]
    assert [each.due_after_batch(9, before=6) for each in (old, new)] == [True, True], "three batches shared a step"
