"""Ranks tell their addresses and hear everybody's; a stranger is not let in; a meeting that is called off ends."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from raysgd.tf.meeting import MeetingFailed, MeetingPoint, meet, own_port


def test_everybody_hears_everybody() -> None:
    point = MeetingPoint(3)
    with ThreadPoolExecutor() as pool:
        heard = pool.map(
            lambda rank: meet("127.0.0.1", point.port, point.token, rank=rank, own=100 + rank, limit_s=10),
            [2, 0, 1],
        )
    assert list(heard) == [["127.0.0.1:100", "127.0.0.1:101", "127.0.0.1:102"]] * 3
    point.close()


def test_a_stranger_is_turned_away() -> None:
    point = MeetingPoint(1)
    with pytest.raises(MeetingFailed, match="did not meet"):
        meet("127.0.0.1", point.port, "not the token", rank=0, own=1, limit_s=10)
    with socket.create_connection(("127.0.0.1", point.port)) as rude:
        rude.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert meet("127.0.0.1", point.port, point.token, rank=0, own=1, limit_s=10) == ["127.0.0.1:1"]
    point.close()


def test_a_meeting_that_is_called_off_ends_at_once() -> None:
    point = MeetingPoint(2)
    threading.Timer(0.3, point.close).start()
    started = time.monotonic()
    with pytest.raises(MeetingFailed):
        meet("127.0.0.1", point.port, point.token, rank=0, own=1, limit_s=30)
    assert time.monotonic() - started < 10


def test_ports_are_free_and_not_shared() -> None:
    with own_port() as one, own_port() as other:
        assert one != other
        with socket.socket() as probe, pytest.raises(OSError):
            probe.bind(("", one))
    with socket.socket() as probe:
        probe.bind(("", one))
