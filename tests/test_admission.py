"""Who shows the token is let in at once; whoever else connects costs little, and not for long."""

import contextlib
import errno
import socket
import time
from collections.abc import Iterator

import pytest

from raysgd import admission
from raysgd.admission import Admission


@pytest.fixture
def door() -> Iterator[Admission]:
    door = Admission("127.0.0.1")
    yield door
    door.close()


def client(door: Admission) -> socket.socket:
    return socket.create_connection(door.address, timeout=10)


def let_in(door: Admission, seconds: float = 5.0) -> list[socket.socket]:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if found := door.admitted(0.05):
            return found
    return []


def test_what_comes_after_the_token_is_left_alone(door: Admission) -> None:
    with client(door) as worker:
        worker.sendall(door.token.encode() + b"and more")
        (connection,) = let_in(door)
        with connection:
            assert connection.recv(100) == b"and more"


def test_a_token_may_come_in_pieces(door: Admission) -> None:
    with client(door) as worker:
        for letter in door.token:
            worker.sendall(letter.encode())
            assert letter is door.token[-1] or door.admitted(0.0) == []
        (connection,) = let_in(door)
        connection.close()


@pytest.mark.parametrize(
    "sent", [b"0" * 32, b"0" * 5000, b"\xff" * 32, b"[" * 32], ids=["zeros", "long", "ff", "nested"]
)
def test_another_token_is_refused_at_once(door: Admission, sent: bytes) -> None:
    with client(door) as stranger:
        stranger.sendall(sent)
        assert let_in(door, 0.3) == []
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""


def test_a_client_that_says_nothing_or_too_slowly_is_dropped(door: Admission, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "TOKEN_S", 0.5)
    with client(door) as silent, client(door) as slow:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                slow.sendall(door.token[:1].encode())
            assert door.admitted(0.1) == []
        for each in (silent, slow):
            with contextlib.suppress(ConnectionResetError):
                assert each.recv(1) == b""


def test_at_most_so_many_wait_at_once(door: Admission) -> None:
    with contextlib.ExitStack() as clients:
        silent = [clients.enter_context(client(door)) for _ in range(80)]
        for _ in range(100):
            assert door.admitted(0.01) == []
        for each in silent:
            each.setblocking(False)
        ended = [each for each in silent if gone(each)]
        assert ended == silent[:16], "the oldest"
        silent[-1].sendall(door.token.encode())
        assert len(door.admitted(5)) == 1


def gone(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_without_a_descriptor_it_makes_room_and_does_not_spin(door: Admission, monkeypatch: pytest.MonkeyPatch) -> None:
    class Exhausted:
        def accept(self) -> None:
            raise OSError(errno.EMFILE, "too many open files")

    with client(door) as first:
        while not door._waiting:
            door.admitted(0.1)
        with monkeypatch.context() as patch:
            patch.setattr(door, "_listener", Exhausted())
            door._accept()
            assert first.recv(1) == b"", "the oldest makes room"
            began = time.monotonic()
            door._accept()
            assert time.monotonic() - began > admission.EXHAUSTED_S / 2
