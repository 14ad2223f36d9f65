"""The line between a worker and its driver: frames, tokens, orders, and what its end means."""

import mmap
import os
import pickle
import queue
import random
import socket
import threading
import time
from typing import Any

import pytest

from raysgd.outcomes import Ok
from raysgd.progress import Control, Progress
from raysgd.rendezvous import Alone
from raysgd.workers import landing
from raysgd.workers.blob import Blob
from raysgd.workers.body import Body
from raysgd.workers.events import Arrived, Event, Gone, Heard
from raysgd.workers.frames import PREFIX, FrameReader, receive, send
from raysgd.workers.line import Line, LineAddress
from raysgd.workers.switchboard import Switchboard


def test_frames_survive_any_cut() -> None:
    one, other = socket.socketpair()
    for number in range(20):
        send(one, {"n": number, "text": "ä" * number}, bytes(range(number)))
    one.close()
    stream = b"".join(iter(lambda: other.recv(1 << 16), b""))
    chance, reader, found = random.Random(1), FrameReader(), []
    while stream:
        cut = chance.randint(1, 40)
        found += reader.feed(stream[:cut])
        stream = stream[cut:]
    assert found == [({"n": n, "text": "ä" * n}, bytes(range(n))) for n in range(20)]


def test_a_body_is_read_to_where_it_stays() -> None:
    one, other = socket.socketpair()
    bodies = [random.Random(n).randbytes(size) for n, size in enumerate([3_000_000, 0, 1, 70_000])]

    def send_all() -> None:
        for n, body in enumerate(bodies):
            send(one, {"n": n}, body)
        one.close()

    sender = threading.Thread(target=send_all, daemon=True)
    sender.start()
    reader, found, rooms = FrameReader(), [], 0
    while (frames := receive(other, reader)) is not None:
        found += frames
        rooms += bool(reader.room())
    sender.join()
    assert found == [({"n": n}, body) for n, body in enumerate(bodies)]
    assert rooms > 0 and not reader.room()


needs_fallocate = pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system sets no room aside")


@needs_fallocate
def test_large_bodies_lie_in_a_file_and_not_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landing, "LARGE", 100_000)
    one, other = socket.socketpair()
    bodies = [random.Random(n).randbytes(size) for n, size in enumerate([300_000, 99_999])]
    for body in bodies:
        threading.Thread(target=send, args=(one, {}, body), daemon=True).start()
        reader, found = FrameReader(), []
        while not found:
            found = receive(other, reader) or []
        held = found[0][1]
        assert isinstance(held, mmap.mmap if body is bodies[0] else bytearray)
        assert bytes(held) == body
        assert pickle.loads(pickle.dumps(Blob(held), 5)).data == body, "it can go on to a worker"


@needs_fallocate
def test_without_room_for_a_file_it_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(landing, "LARGE", 100)
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert landing.landing(200) == bytearray(200)


class Desk:
    """A switchboard with its events."""

    def __init__(self) -> None:
        self.events: queue.Queue[Event] = queue.Queue()
        self.board = Switchboard(self.events, "127.0.0.1")

    def line(self, worker: str = "w", token: str | None = None) -> Line:
        self.aborted: list[str] = []
        address = LineAddress(*self.board.address, token or self.board.token)
        return Line(address, worker, "node", lambda: self.aborted.append(worker))

    def next(self, kind: type) -> Any:
        while True:
            event = self.events.get(timeout=5)
            if isinstance(event, kind):
                return event


@pytest.fixture
def desk() -> Any:
    desk = Desk()
    yield desk
    desk.board.close()


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_worker_arrives_and_is_told(desk: Desk) -> None:
    line = desk.line()
    arrived = desk.next(Arrived)
    assert (arrived.worker, arrived.node) == ("w", "node")
    line.call, line.generation = 7, 2
    desk.board.tell("w", {"t": "propose", "id": 1, "call": 7, "at": 5})
    assert desk.next(Heard).message == {"t": "consent", "id": 1, "kept": True, "begun": 0}
    desk.board.tell("w", {"t": "propose", "id": 2, "call": 6, "at": 5})
    refused = desk.next(Heard).message
    assert (refused["kept"], refused["begun"]) == (False, -1), "an order for another call is refused"
    desk.board.tell("w", {"t": "interrupt", "generation": 1})
    desk.board.tell("w", {"t": "stack", "id": 3})
    assert any("test_lines.py" in frame for frame in desk.next(Heard).message["frames"])
    assert not line.control.interrupted and not desk.aborted, "an order of an old generation means nothing"
    desk.board.tell("w", {"t": "interrupt", "generation": 2})
    wait_for(lambda: desk.aborted == ["w"] and line.control.interrupted)
    desk.board.hang_up("w")


class Stepping:
    """A replica that wants to begin step 6."""

    progress = Progress()

    def __init__(self, seat: Any, control: Control) -> None:
        self.control = control

    def run(self, method: str) -> bool:
        return self.control.begin(6)


def test_a_stop_that_was_agreed_on_before_the_work_began_is_kept(desk: Desk) -> None:
    """The driver asks as soon as the call is sent; the main thread may still be fetching its arguments."""
    line = desk.line()
    body = Body(Alone(), line.control)
    body.perform("build", {"factory": Stepping, "seat": None})
    desk.next(Arrived)
    line.begin(7)
    desk.board.tell("w", {"t": "propose", "id": 1, "call": 7, "at": 5})
    assert desk.next(Heard).message["kept"]
    desk.board.tell("w", {"t": "confirm"})
    stopped = body.perform("run", {"method": "train", "arguments": {}})
    assert isinstance(stopped, Ok) and stopped.value is False
    line.begin(8)
    free = body.perform("run", {"method": "train", "arguments": {}})
    assert isinstance(free, Ok) and free.value is True, "it was asked of another call"
    desk.board.hang_up("w")


def test_uploads_do_not_take_the_line(desk: Desk) -> None:
    line = desk.line()
    body = random.Random(2).randbytes(3 << 20)
    line.upload({"progress": [1, 2]}, body)
    heard = desk.next(Heard)
    assert heard.body == body and heard.message["progress"] == [1, 2] and heard.worker == "w"
    desk.board.hang_up("w")


def test_a_stranger_is_refused(desk: Desk) -> None:
    with socket.create_connection(desk.board.address) as stranger:
        send(stranger, {"t": "hello", "token": "guess", "worker": "w", "node": "n", "pid": 1})
        stranger.settimeout(5)
        assert stranger.recv(1) == b""
    with socket.create_connection(desk.board.address) as stranger:
        header = b'{"t": "upload", "worker": "w"}'
        stranger.sendall(PREFIX.pack(len(header), 2**62) + header)  # no room is made for that
        stranger.settimeout(5)
        assert stranger.recv(1) == b""
    for header in (b"[]", '{"token": "ä"}'.encode()):
        with socket.create_connection(desk.board.address) as stranger:
            stranger.sendall(PREFIX.pack(len(header), 0) + header)
            stranger.settimeout(5)
            assert stranger.recv(1) == b""
    with socket.create_connection(desk.board.address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n")
        stranger.settimeout(5)
        assert stranger.recv(1) == b""
    assert desk.events.empty()


def test_the_end_of_a_line_is_told_once(desk: Desk) -> None:
    with socket.create_connection(desk.board.address) as worker:
        send(worker, {"t": "hello", "token": desk.board.token, "worker": "w", "node": "n", "pid": 1})
        desk.next(Arrived)
    assert "process ended" in desk.next(Gone).cause
    assert not desk.board.tell("w", {"t": "confirm"})


def test_late_words_of_a_line_that_was_hung_up(desk: Desk) -> None:
    with socket.create_connection(desk.board.address) as worker:
        send(worker, {"t": "hello", "token": desk.board.token, "worker": "w", "node": "n", "pid": 1})
        desk.next(Arrived)
        desk.board.hang_up("w")
        desk.board._take(worker, {"t": "progress"}, bytearray())  # it was read just before
        send(worker, {"t": "progress"})
    assert desk.events.empty()
    desk.line("next")
    assert desk.next(Arrived).worker == "next", "the board goes on"
    desk.board.hang_up("next")


def test_who_leaves_on_purpose_is_no_news(desk: Desk) -> None:
    desk.line()
    desk.next(Arrived)
    desk.board.hang_up("w")
    time.sleep(0.1)
    assert desk.events.empty()


def test_a_machine_that_falls_silent_is_asked_for(desk: Desk) -> None:
    """Pulled cables are tried in tests/network; here, that every line is set to notice them."""
    desk.board.unreachable_s = 10.0
    desk.line()
    desk.next(Arrived)
    server_end = desk.board._lines["w"]
    assert server_end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    limits = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_USER_TIMEOUT": 10_000}
    for name, value in limits.items():
        if hasattr(socket, name):
            assert server_end.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == value, name
    desk.board.hang_up("w")
