"""Calls and answers on a control connection carry a code, and nothing of one with a wrong code is unpickled."""

import pickle
import queue
from typing import Any

import pytest

from raysgd.core.messages import CallAnswer, PerformCall
from raysgd.core.outcomes import Failed, Ok
from raysgd.workers.blob import SMALL, PickledObject
from raysgd.workers.calls import ANSWER, CALL, CALL_HEAD, CallChannel, packed_outcome, seal, unseal
from raysgd.workers.control_client import ControlClient
from raysgd.workers.control_server import ControlServer
from raysgd.workers.events import CallEnded, MessageReceived, WorkerEnded, WorkerStarted

ran: list[int] = []


class Runs:
    """A value that notes that it was unpickled."""

    def __reduce__(self) -> Any:
        return ran.append, (1,)


class Sender:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, worker: str, message: PerformCall, body: bytes = b"") -> bool:
        self.sent.append(body)
        return True


def answer(body: bytes) -> MessageReceived:
    return MessageReceived("w", CallAnswer(), body)


def test_a_call_and_its_answer() -> None:
    control: Any = Sender()
    channel = CallChannel(control)
    assert channel.send("w", CALL_HEAD.pack(7, 2) + b"call")
    assert unseal(channel.key, CALL, control.sent[0]) == CALL_HEAD.pack(7, 2) + b"call"
    packed = packed_outcome(Ok(PickledObject(pickle.dumps([1, 2]))))
    assert packed is not None
    assert channel.opened(answer(seal(channel.key, ANSWER, CALL_HEAD.pack(7, 0) + packed))) == CallEnded(
        "w", 7, Ok([1, 2])
    )
    assert packed_outcome(Ok(PickledObject(bytes(SMALL)))) is None, "Ray sends large outcomes"


def test_a_user_error_that_cannot_be_read_is_a_failed_call() -> None:
    channel = CallChannel(Sender())  # type: ignore[arg-type]
    ended = channel.opened(answer(seal(channel.key, ANSWER, CALL_HEAD.pack(3, 0) + b"no pickle")))
    assert isinstance(ended, CallEnded) and ended.call == 3 and isinstance(ended.outcome, Failed)


@pytest.mark.parametrize("what", ["another key", "changed", "a call", "empty"])
def test_an_answer_with_a_wrong_code_is_not_unpickled(what: str) -> None:
    channel, data = CallChannel(Sender()), CALL_HEAD.pack(7, 0) + pickle.dumps(Runs())  # type: ignore[arg-type]
    good = seal(channel.key, ANSWER, data)
    forged = {
        "another key": seal(bytes(32), ANSWER, data),
        "changed": good[:-1] + bytes([good[-1] ^ 1]),
        "a call": seal(channel.key, CALL, data),
        "empty": b"",
    }
    ended = channel.opened(answer(forged[what]))
    assert isinstance(ended, WorkerEnded) and "key" in ended.cause and not ran


def test_a_call_travels_over_a_control_connection_and_its_answer_back() -> None:
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    server = ControlServer(events, "127.0.0.1")
    channel = CallChannel(server)
    try:
        client = ControlClient(server.address_for_workers(), "w", "node", lambda: None)
        assert isinstance(events.get(timeout=10), WorkerStarted)
        assert channel.send("w", CALL_HEAD.pack(7, 2) + b"x" * 60_000)
        channel.free_main_thread("w")
        received = client.calls.get(timeout=10)
        assert unseal(channel.key, CALL, bytes(received)) == CALL_HEAD.pack(7, 2) + b"x" * 60_000
        assert client.calls.get(timeout=10) == b"", "the next call comes through Ray"
        client.answer(seal(channel.key, ANSWER, CALL_HEAD.pack(7, 0) + pickle.dumps(Ok(5))))
        assert channel.opened(events.get(timeout=10)) == CallEnded("w", 7, Ok(5))
    finally:
        client._open = False
        server.close()
