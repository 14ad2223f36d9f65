"""The line between a worker and its driver: frames, tokens, orders, and what its end means."""

import json
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
from raysgd.protocols import Call
from raysgd.rendezvous import Alone
from raysgd.workers import landing
from raysgd.workers.blob import Blob
from raysgd.workers.body import Body
from raysgd.workers.events import Arrived, Event, Gone, Heard
from raysgd.workers.frames import ADMITTED, PREFIX, FrameReader, packed, receive, send
from raysgd.workers.line import Line, LineAddress, brief
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

    def __init__(self, rank_info: Any, control: Control) -> None:
        self.control = control

    def run(self, call: Call) -> bool:
        return self.control.begin(6)


def test_a_stop_that_was_agreed_on_before_the_work_began_is_kept(desk: Desk) -> None:
    """The driver asks as soon as the call is sent; the main thread may still be fetching its arguments."""
    line = desk.line()
    body = Body(Alone(), line.control)
    body.perform("build", {"factory": Stepping, "rank_info": None})
    desk.next(Arrived)
    line.begin(7)
    desk.board.tell("w", {"t": "propose", "id": 1, "call": 7, "at": 5})
    assert desk.next(Heard).message["kept"]
    desk.board.tell("w", {"t": "confirm"})
    stopped = body.perform("run", {"call": Call(Stepping.run)})
    assert isinstance(stopped, Ok) and stopped.value is False
    line.begin(8)
    free = body.perform("run", {"call": Call(Stepping.run)})
    assert isinstance(free, Ok) and free.value is True, "it was asked of another call"
    desk.board.hang_up("w")


def test_uploads_do_not_take_the_line(desk: Desk) -> None:
    line = desk.line()
    body = random.Random(2).randbytes(3 << 20)
    line.upload({"progress": [1, 2]}, body)
    heard = desk.next(Heard)
    assert heard.body == body and heard.message["progress"] == [1, 2] and heard.worker == "w"
    desk.board.hang_up("w")


def greet(desk: Desk, worker: str = "w") -> socket.socket:
    """A worker's connection, made by hand."""
    connection = socket.create_connection(desk.board.address, timeout=5)
    hello = {"t": "hello", "worker": worker, "node": "n", "pid": 1}
    connection.sendall(desk.board.token.encode() + packed(hello))
    return connection


def test_a_stranger_is_refused(desk: Desk) -> None:
    hello = packed({"t": "hello", "token": desk.board.token, "worker": "w", "node": "n", "pid": 1})
    for sent in (b"0" * 32, b"0" * 32 + hello, b"\xff" * 64, b"GET / HTTP/1.1\r\nHost: example\r\n\r\n", hello):
        with socket.create_connection(desk.board.address, timeout=5) as stranger:
            stranger.sendall(sent)
            assert ended(stranger)
    assert desk.events.empty()


def ended(connection: socket.socket) -> bool:
    """Waits until the other end closes the connection."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "message",
    [
        b"[]",
        b"[" * 200_000,
        b"\xff\xfe",
        b"{}",
        b'{"t": "hello", "worker": "w"}',
        b'{"t": "hello", "worker": ["w"], "node": 1, "pid": "x"}',
        b'{"t": ["hello"], "worker": "w"}',
        b'{"t": "hello", "worker": "there", "node": "n", "pid": 1}',
    ],
)
def test_a_first_message_of_another_kind_ends_its_connection_only(desk: Desk, message: bytes) -> None:
    """Even with the right token."""
    with greet(desk, "there") as there:
        desk.next(Arrived)
        with socket.create_connection(desk.board.address, timeout=5) as other:
            other.sendall(desk.board.token.encode() + PREFIX.pack(len(message), 0) + message)
            assert ended(other)
        assert there.recv(1) == ADMITTED
        assert desk.board.tell("there", {"t": "confirm"}), "the one that was there is served"
    assert desk.next(Gone).worker == "there"


@pytest.mark.parametrize("body", [2**62, 2**64 - 1])
def test_a_body_without_room_ends_its_connection_only(desk: Desk, body: int) -> None:
    with greet(desk) as worker:
        desk.next(Arrived)
        worker.sendall(packed({"t": "progress"}, body))
        gone = desk.next(Gone)
        assert gone.worker == "w" and gone.reason == "network" and "Error" in gone.cause
    desk.line("next")
    assert desk.next(Arrived).worker == "next"
    desk.board.hang_up("next")


def test_a_worker_that_never_reads_does_not_hold_the_driver_up(desk: Desk) -> None:
    with greet(desk) as worker:
        desk.next(Arrived)
        words = {"t": "stack", "id": "x" * 5000}
        deadline = time.monotonic() + 30
        while desk.board.tell("w", words):
            assert time.monotonic() < deadline
        assert desk.next(Gone).reason == "network"
        assert worker.fileno() >= 0


def test_a_greeting_that_is_not_complete_in_time_is_refused(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raysgd.workers.switchboard.GREETING_S", 0.3)
    for sent in (b"", b"0" * 31, desk.board.token.encode(), desk.board.token.encode() + PREFIX.pack(100, 0)):
        with socket.create_connection(desk.board.address, timeout=5) as late:
            late.sendall(sent)
            assert ended(late)
    with greet(desk) as worker:
        desk.next(Arrived)
        time.sleep(0.5)
        assert desk.board.tell("w", {"t": "confirm"}), "who is admitted may be silent"
        assert worker.recv(1) == ADMITTED


def test_only_so_many_wait_for_admission(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raysgd.workers.switchboard.GREETING_AT_MOST", 3)
    silent = [socket.create_connection(desk.board.address, timeout=5) for _ in range(5)]
    assert ended(silent[0]) and ended(silent[1]), "the oldest make room"
    with greet(desk):
        desk.next(Arrived)
        silent[4].setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[4].recv(1)
    for each in silent:
        each.close()


def test_a_refused_worker_tries_again(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of connections may push out the greeting of a worker."""
    admit, tries = desk.board._admit, []

    def first_refused(peer: Any, message: dict[str, Any]) -> None:
        tries.append(message)
        if len(tries) == 1:
            raise ValueError("planned")
        admit(peer, message)

    monkeypatch.setattr(desk.board, "_admit", first_refused)
    desk.line()
    assert desk.next(Arrived).worker == "w"
    desk.board.hang_up("w")


def test_a_delivery_that_does_not_arrive_is_an_error(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    line = desk.line()
    line.deliver({"kind": "report"}, b"abc")
    heard = desk.next(Heard)
    assert heard.body == b"abc" and heard.message["kind"] == "report"

    def full(size: int) -> bytearray:
        if size:
            raise MemoryError
        return bytearray()

    monkeypatch.setattr("raysgd.workers.frames.landing", full)
    with pytest.raises(ConnectionError):
        line.deliver({"kind": "report"}, b"abc")
    desk.board.hang_up("w")


def test_the_end_of_a_line_is_told_once(desk: Desk) -> None:
    with greet(desk):
        desk.next(Arrived)
    assert "process ended" in desk.next(Gone).cause
    assert not desk.board.tell("w", {"t": "confirm"})


def test_late_words_of_a_line_that_was_hung_up(desk: Desk) -> None:
    with greet(desk) as worker:
        desk.next(Arrived)
        desk.board.hang_up("w")
        send(worker, {"t": "progress"})
        desk.line("next")
        assert desk.next(Arrived).worker == "next", "the board goes on"
    desk.board.hang_up("next")
    assert desk.events.empty()


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
    server_end = desk.board._peers["w"].connection
    assert server_end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    limits = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_USER_TIMEOUT": 10_000}
    for name, value in limits.items():
        if hasattr(socket, name):
            assert server_end.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == value, name
    desk.board.hang_up("w")


def test_progress_messages_carry_short_values_only() -> None:
    assert brief(None) is None
    plain = {"epoch": 3, "loss": 0.5, "note": "fine", "done": True, "batch_count": 7, "num_samples": 28}
    other = {"long": "x" * 10_000, "nested": [[1]], "large": 2**70, 5: 1.0, "n" * 300: 1.0, "none": None}
    assert brief({**plain, **other}) == plain
    many = brief({**{f"metric-{n}": float(n) for n in range(100_000)}, **plain})
    assert many is not None and len(json.dumps(many)) < 70_000 and len(many) > 1000
    assert (many["epoch"], many["batch_count"], many["num_samples"]) == (3, 7, 28), "counts always go"
