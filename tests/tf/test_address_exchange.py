"""The socket over which TensorFlow's ranks learn each other's addresses, and clients that do not belong there.

Most of these fail today. The exchange is replaced by a call to the workers, and its socket goes away with it.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from raysgd.tf.meeting import MeetingPoint, meet

LIMIT_S = 3.0


@pytest.fixture
def point() -> Iterator[MeetingPoint]:
    opened = MeetingPoint(2)
    yield opened
    opened.close()


def all_ranks_meet(point: MeetingPoint) -> bool:
    """Return whether two ranks that come now learn each other's addresses within the limit."""
    found: list[list[str]] = []

    def rank(number: int) -> None:
        with contextlib.suppress(OSError):
            found.append(meet("127.0.0.1", point.port, point.token, rank=number, own=1000 + number, limit_s=LIMIT_S))

    threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_S)
    return found == [["127.0.0.1:1000", "127.0.0.1:1001"]] * 2


ENDS = pytest.mark.xfail(reason="an unexpected packet ends the thread of the exchange", strict=True)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "packet",
    [
        pytest.param(b"1\n", marks=ENDS, id="number"),
        pytest.param(b"[1]\n", marks=ENDS, id="list"),
        pytest.param(b"[" * 200_000 + b"\n", marks=ENDS, id="nested"),
        pytest.param(b'{"token": [[]]}\n', id="no token"),
        pytest.param(b"\xff" * 64 + b"\n", id="no text"),
    ],
)
def test_a_packet_without_the_token_disturbs_nothing(point: MeetingPoint, packet: bytes) -> None:
    with socket.create_connection(("127.0.0.1", point.port)) as stranger:
        stranger.sendall(packet)
        assert all_ranks_meet(point)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.xfail(reason="a silent client holds the exchange up", strict=True)
def test_silent_clients_delay_nothing(point: MeetingPoint, count: int) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.create_connection(("127.0.0.1", point.port)))
        time.sleep(0.1)
        assert all_ranks_meet(point)


@pytest.mark.xfail(reason="the exchange listens on all addresses", strict=True)
def test_it_listens_on_one_address(point: MeetingPoint) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", point.port), timeout=1).close()
