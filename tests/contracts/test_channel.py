"""The contract of the control channel: what the driver and its workers rely on, and what other clients cannot do."""

import json
import mmap
import os
import pickle
import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from raysgd.core import connection
from raysgd.core.connection import (
    PREFIX,
    TOKEN_BYTES,
    ControlAddress,
    connect,
    framed,
    receive,
    receive_body,
    receive_message,
    send,
)
from raysgd.core.messages import (
    Admitted,
    Alive,
    BoundaryAnswer,
    ConfirmBoundary,
    FunctionReport,
    GiveState,
    Hello,
    Interrupt,
    KillProcess,
    Message,
    MessageError,
    OpenBulk,
    OpenTransfer,
    PreemptionNotice,
    ProgressReport,
    ProposeBoundary,
    Received,
    SnapshotUpload,
    StackReport,
    StackRequest,
    StartDealer,
    State,
    TakeState,
    decode,
    encode,
)
from raysgd.core.outcomes import CollectivePlace, Ok
from raysgd.core.progress import Control, Progress
from raysgd.core.protocols import Call
from raysgd.core.ranks import SingleWorkerBackend
from raysgd.errors import ConfigError
from raysgd.workers import control_server
from raysgd.workers.blob import Blob
from raysgd.workers.control_client import ControlClient, brief
from raysgd.workers.control_server import ControlServer
from raysgd.workers.events import Event, MessageReceived, PartReceived, WorkerEnded, WorkerStarted
from raysgd.workers.replica_host import ReplicaHost
from raysgd.workers.transfer import Giving, Transfer, take

REPORT = FunctionReport("report", run=1, attempt=2, rank=3, metrics_size=3, has_checkpoint=False)


# -- messages -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        ProgressReport(
            1, Progress(step=3, phase="train", finished=True), {"loss": 0.5, "note": "ä", "n": 2, "ok": True}
        ),
        ProgressReport(1, Progress(), None),
        SnapshotUpload(Progress(batches=2), 7, {}),
        StackReport(1, ("a.py:1 f", "b.py:2 g"), "train", 3),
        StackReport(1, (), "train", 3, CollectivePlace(4, "forward", "a.py:1 f", ((1, 2), (2, 4)), ((2, "a.py:1 f"),))),
        StackReport(1, ()),
        REPORT,
        Alive(),
        Hello("w", "node", 1),
    ],
)
def test_a_message_is_decoded_as_it_was_encoded(message: Message) -> None:
    assert decode(encode(message)) == message


def test_every_message_is_documented_and_frozen() -> None:
    for kind in Message.__subclasses__():
        assert kind.__doc__ and not kind.__doc__.startswith(kind.__name__), kind
        assert kind.__dataclass_params__.frozen, kind


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b"1",
        b"[" * 200_000,
        b"\xff\xfe",
        b"{}",
        b'{"type": "Hello", "worker": "w"}',
        b'{"type": "Hello", "worker": "w", "node": "n", "pid": 1, "more": 1}',
        b'{"type": "Hello", "worker": ["w"], "node": 1, "pid": "x"}',
        b'{"type": ["Hello"], "worker": "w", "node": "n", "pid": 1}',
        b'{"type": "Any"}',
        b'{"type": "Message"}',
        b'{"type": "__init__"}',
        b'{"type": "KillProcess", "pid": true}',
        b'{"type": "KillProcess", "pid": 1.0}',
        b'{"type": "KillProcess", "pid": ' + b"9" * 5000 + b"}",
        b'{"type": "StackReport", "round": 1, "frames": [1], "phase": "", "batch": 0}',
        b'{"type": "StackReport", "round": 1, "frames": "abc", "phase": "", "batch": 0}',
        b'{"type": "ProgressReport", "call": 1, "progress": {}, "partial": null}',
        b'{"type": "ProgressReport", "call": 1, "progress": [1], "partial": null}',
        b'{"type": "FunctionReport", "kind": "x", "run": 1, "attempt": 1, "rank": 1, "metrics_size": 1, "has_checkpoint": true}',
    ],
)
def test_any_other_header_is_refused(header: bytes) -> None:
    with pytest.raises(MessageError, match="not a raysgd control message"):
        decode(header)


def test_numpy_numbers_become_python_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    decoded = decode(encode(ProgressReport(1, Progress(step=numpy.int64(3)), {"loss": numpy.float32(0.5)})))
    assert decoded == ProgressReport(1, Progress(step=3), {"loss": 0.5})
    with pytest.raises(TypeError, match="cannot be part of a control message"):
        encode(ProgressReport(1, Progress(), {"loss": object()}))


# -- framing ------------------------------------------------------------------------------------------


def test_bodies_arrive_completely() -> None:
    one, other = socket.socketpair()
    bodies = [random.Random(n).randbytes(size) for n, size in enumerate([9_000_000, 0, 1, 70_000])]

    def send_all() -> None:
        for n, body in enumerate(bodies):
            send(one, KillProcess(n), body)
        one.close()

    threading.Thread(target=send_all, daemon=True).start()
    for n, body in enumerate(bodies):
        message, size = receive_message(other)
        assert message == KillProcess(n) and receive_body(other, size) == body
    with pytest.raises(ConnectionError):
        receive_message(other)
    other.close()


def test_a_message_that_comes_byte_by_byte() -> None:
    one, other = socket.socketpair()

    def drip() -> None:
        for byte in framed(StackRequest(5)):
            one.sendall(bytes([byte]))

    threading.Thread(target=drip, daemon=True).start()
    assert receive(other, StackRequest) == StackRequest(5)
    one.close()
    other.close()


def test_a_header_that_is_too_large_is_neither_sent_nor_read() -> None:
    one, other = socket.socketpair()
    with one, other:
        with pytest.raises(ValueError, match="too long"):
            send(one, StartDealer("x" * (2 << 20)))
        one.sendall(PREFIX.pack(2**31, 0))
        with pytest.raises(ValueError, match="not a raysgd control message"):
            receive_message(other)


needs_fallocate = pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system has no posix_fallocate")


@needs_fallocate
def test_large_bodies_are_in_a_file_and_not_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LARGE", 100_000)
    one, other = socket.socketpair()
    with one, other:
        bodies = [random.Random(n).randbytes(size) for n, size in enumerate([300_000, 99_999])]
        for body in bodies:
            threading.Thread(target=send, args=(one, Received(), body), daemon=True).start()
            held = receive_body(other, receive_message(other)[1])
            assert isinstance(held, mmap.mmap if body is bodies[0] else bytearray)
            assert bytes(held) == body
            assert pickle.loads(pickle.dumps(Blob(held), 5)).data == body, "the body can be sent to a worker"


@needs_fallocate
def test_without_room_for_a_file_the_body_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(connection, "LARGE", 100)
    monkeypatch.setattr(os, "posix_fallocate", full)
    one, other = socket.socketpair()
    with one, other:
        send(one, Received(), bytes(200))
        assert receive_body(other, receive_message(other)[1]) == bytearray(200)


# -- a driver and its workers -------------------------------------------------------------------------


class Channel:
    """A control server with its events, and its clients."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.server = ControlServer(self.events, "127.0.0.1")
        self.accepted: list[Any] = []
        self.aborted: list[str] = []
        accept = self.server._hand_over
        self.server._hand_over = lambda peer, first: (self.accepted.append(first), accept(peer, first))  # type: ignore[assignment]

    @property
    def address(self) -> ControlAddress:
        return self.server.address_for_workers()

    def client(self, worker: str = "w") -> ControlClient:
        return ControlClient(self.address, worker, "node", lambda: self.aborted.append(worker))

    def greet(self, worker: str = "w") -> socket.socket:
        """Open a worker's control connection without a client."""
        return connect(self.address, Hello(worker, "n", 1))

    def open(self, sent: bytes = b"") -> socket.socket:
        opened = socket.create_connection(self.server.address, timeout=5)
        opened.sendall(sent)
        return opened

    def next(self, kind: type) -> Any:
        while True:
            event = self.events.get(timeout=5)
            if isinstance(event, kind):
                return event


@pytest.fixture
def channel() -> Iterator[Channel]:
    channel = Channel()
    yield channel
    channel.server.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ended(opened: socket.socket) -> bool:
    """Wait until the other end closes the connection."""
    try:
        return opened.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_worker_connects_and_handles_messages(channel: Channel) -> None:
    client = channel.client()
    assert channel.next(WorkerStarted) == WorkerStarted("w", "node", os.getpid(), "127.0.0.1")
    client.call, client.generation = 7, 2
    channel.server.send("w", ProposeBoundary(round=1, call=7, step=5))
    assert channel.next(MessageReceived).message == BoundaryAnswer(round=1, accepted=True, begun=0)
    channel.server.send("w", ProposeBoundary(round=2, call=6, step=5))
    assert channel.next(MessageReceived).message == BoundaryAnswer(2, False, -1), (
        "a proposal for another call is refused"
    )
    channel.server.send("w", Interrupt(1))
    channel.server.send("w", StackRequest(3))
    assert any("test_channel.py" in frame for frame in channel.next(MessageReceived).message.frames)
    assert not client.control.interrupted and not channel.aborted, "an interrupt of an old generation is ignored"
    channel.server.send("w", Interrupt(2))
    wait_for(lambda: channel.aborted == ["w"] and client.control.interrupted)
    client.notice()
    assert channel.next(MessageReceived).message == PreemptionNotice()
    client.control.report(Progress(step=4), {"loss": 0.5, "table": [1]})
    assert channel.next(MessageReceived).message == ProgressReport(7, Progress(step=4), {"loss": 0.5})
    channel.server.disconnect("w")


class Stepping:
    """A replica that wants to begin step 6."""

    progress = Progress()

    def __init__(self, rank_info: Any, control: Control) -> None:
        self.control = control

    def run(self, call: Call) -> bool:
        return self.control.begin(6)


def test_a_boundary_that_was_agreed_on_before_the_work_began_is_kept(channel: Channel) -> None:
    """The driver proposes a boundary as soon as the call is sent. The main thread may still be fetching its
    arguments."""
    client = channel.client()
    host = ReplicaHost(SingleWorkerBackend(), client.control, remote=False)
    host.perform("build", {"factory": Stepping, "rank_info": None})
    channel.next(WorkerStarted)
    client.begin(7)
    channel.server.send("w", ProposeBoundary(1, 7, 5))
    assert channel.next(MessageReceived).message.accepted
    channel.server.send("w", ConfirmBoundary())
    stopped = host.perform("run", {"call": Call(Stepping.run)})
    assert isinstance(stopped, Ok) and stopped.value is False
    client.begin(8)
    free = host.perform("run", {"call": Call(Stepping.run)})
    assert isinstance(free, Ok) and free.value is True, "the boundary was that of another call"
    channel.server.disconnect("w")


def test_the_end_of_a_connection_is_one_event_at_once(channel: Channel) -> None:
    with channel.greet():
        channel.next(WorkerStarted)
    failure = channel.next(WorkerEnded)
    assert "process ended" in failure.cause and failure.reason == "worker death"
    assert not channel.server.send("w", ConfirmBoundary())
    assert channel.events.empty()


def test_the_end_of_a_worker_that_was_dismissed_is_no_event(channel: Channel) -> None:
    channel.client()
    channel.next(WorkerStarted)
    channel.server.disconnect("w")
    time.sleep(0.1)
    assert channel.events.empty()


def test_late_messages_of_a_worker_that_was_dismissed_are_dropped(channel: Channel) -> None:
    with channel.greet() as worker:
        channel.next(WorkerStarted)
        channel.server.disconnect("w")
        send(worker, PreemptionNotice())
        channel.client("next")
        assert channel.next(WorkerStarted).worker == "next", "the server still serves others"
    channel.server.disconnect("next")
    assert channel.events.empty()


def test_silence_is_measured_from_the_last_message(channel: Channel) -> None:
    assert channel.server.silent_for("nobody") == 0.0
    with channel.greet() as worker:
        channel.next(WorkerStarted)
        time.sleep(0.3)
        assert channel.server.silent_for("w") >= 0.3
        send(worker, Alive())
        wait_for(lambda: channel.server.silent_for("w") < 0.2)


def test_a_worker_that_never_reads_does_not_block_the_driver(channel: Channel) -> None:
    with channel.greet() as worker:
        channel.next(WorkerStarted)
        deadline = time.monotonic() + 30
        while channel.server.send("w", StartDealer("x" * 5000)):
            assert time.monotonic() < deadline
        failure = channel.next(WorkerEnded)
        assert failure.reason == "network" and "has not read" in failure.cause
        assert worker.fileno() >= 0


def test_connections_detect_an_unreachable_machine(channel: Channel) -> None:
    """Check the options of the sockets. tests/network cuts a real connection."""
    channel.server.unreachable_s = 10.0
    channel.client()
    channel.next(WorkerStarted)
    server_end = channel.server._workers["w"].connection
    assert server_end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    limits = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_USER_TIMEOUT": 10_000}
    for name, value in limits.items():
        if hasattr(socket, name):
            assert server_end.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == value, name
    channel.server.disconnect("w")


def test_progress_messages_contain_only_short_values() -> None:
    assert brief(None) is None
    plain = {"epoch": 3, "loss": 0.5, "note": "fine", "done": True, "batch_count": 7, "num_samples": 28}
    other = {"long": "x" * 10_000, "nested": [[1]], "large": 2**70, 5: 1.0, "n" * 300: 1.0, "none": None}
    assert brief({**plain, **other}) == plain
    numpy = {"loss": np.float32(0.5), "epoch": np.int64(3), "best": np.bool_(True)}
    assert json.dumps(brief(numpy)) == '{"loss": 0.5, "epoch": 3}'
    many = brief({**{f"metric-{n}": float(n) for n in range(100_000)}, **plain})
    assert many is not None and len(json.dumps(many)) < 70_000 and len(many) > 1000
    assert (many["epoch"], many["batch_count"], many["num_samples"]) == (3, 7, 28), "counts are always included"


# -- bulk connections ---------------------------------------------------------------------------------


def test_all_reports_and_snapshots_of_a_worker_use_one_connection(channel: Channel) -> None:
    client = channel.client()
    channel.next(WorkerStarted)
    body = random.Random(2).randbytes(3 << 20)
    for _ in range(5):
        client.deliver(REPORT, b"abc")
        received = channel.next(MessageReceived)
        assert (received.worker, received.message, bytes(received.body)) == ("w", REPORT, b"abc")
    client.upload(SnapshotUpload(Progress(step=1), 2, {"loss": 1.0, "table": [1]}), body)
    received = channel.next(MessageReceived)
    assert received.body == body and received.message == SnapshotUpload(Progress(step=1), 2, {"loss": 1.0})
    client.deliver(StartDealer("d"), b"")
    assert channel.next(MessageReceived).message == StartDealer("d")
    assert channel.accepted == [OpenBulk("w")]
    channel.server.disconnect("w")


def test_a_large_body_does_not_delay_the_control_connection(channel: Channel) -> None:
    client = channel.client()
    channel.next(WorkerStarted)
    sender = threading.Thread(target=client.deliver, args=(REPORT, bytes(300 << 20)), daemon=True)
    sender.start()
    answered = 0
    while sender.is_alive():
        channel.server.send("w", StackRequest(answered))
        while not isinstance(channel.next(MessageReceived).message, StackReport):
            continue
        answered += 1
    assert answered > 2, "the worker answered requests while its body was being sent"
    channel.server.disconnect("w")


def test_a_delivery_that_does_not_arrive_is_an_error_and_the_next_one_works(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = channel.client()

    def full(opened: socket.socket, size: int) -> bytearray:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(control_server, "receive_body", full)
        with pytest.raises(ConnectionError):
            client.deliver(REPORT, b"abc")
    client.deliver(REPORT, b"abc")
    assert channel.next(MessageReceived).message == REPORT
    assert channel.accepted == [OpenBulk("w")] * 2
    channel.server.disconnect("w")


def test_a_bulk_connection_that_was_closed_is_opened_again(channel: Channel) -> None:
    client = channel.client()
    client.deliver(REPORT, b"abc")
    for each in list(channel.server._handed_over):
        each.shutdown(socket.SHUT_RDWR)
    wait_for(lambda: not channel.server._handed_over)
    client.deliver(REPORT, b"def")
    assert [bytes(channel.next(MessageReceived).body) for _ in range(2)] == [b"abc", b"def"]
    channel.server.disconnect("w")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_reports_over_its_own_connection(channel: Channel) -> None:
    client = channel.client()
    client.deliver(REPORT, b"parent")
    with client._bulk_lock:  # as if another thread were sending at that moment
        child = os.fork()
        if child == 0:
            try:
                client.deliver(REPORT, b"child")
            finally:
                os._exit(0)
    client.deliver(REPORT, b"parent again")
    os.waitpid(child, 0)
    bodies = sorted(bytes(channel.next(MessageReceived).body) for _ in range(3))
    assert bodies == [b"child", b"parent", b"parent again"]
    assert channel.accepted == [OpenBulk("w")] * 2
    channel.server.disconnect("w")


def test_a_message_that_cannot_be_carried_out_does_not_end_the_workers_thread(
    channel: Channel, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise OSError(24, "too many open files")

    client = ControlClient(channel.address, "w", "node", fails)
    channel.next(WorkerStarted)
    channel.server.send("w", Interrupt(1))
    channel.server.send("w", StackRequest(5))
    assert channel.next(MessageReceived).message.round == 5
    assert "Interrupt could not be carried out" in caplog.text and client.control.interrupted
    channel.server.disconnect("w")


@pytest.mark.parametrize("size", [2**62, 2**64 - 1])
@pytest.mark.parametrize("first", [Hello("w", "n", 1), OpenBulk("w")])
def test_a_body_without_room_ends_its_connection_only(channel: Channel, first: Message, size: int) -> None:
    with connect(channel.address, first) as worker:
        worker.sendall(framed(REPORT, size))
        assert ended(worker)
    if isinstance(first, Hello):
        failure = channel.next(WorkerEnded)
        assert failure.worker == "w" and failure.reason == "network" and "a body of" in failure.cause
    channel.client("next")
    assert channel.next(WorkerStarted).worker == "next"
    channel.server.disconnect("next")


def test_control_messages_on_a_bulk_connection_end_it(channel: Channel) -> None:
    with connect(channel.address, OpenBulk("w")) as bulk:
        send(bulk, PreemptionNotice())
        assert ended(bulk)
    assert channel.events.empty()


# -- checkpoint connections ---------------------------------------------------------------------------


def test_a_checkpoint_connection_is_handed_to_its_receiver(channel: Channel) -> None:
    """What was sent after the first message is still in the connection."""
    taken: queue.Queue[socket.socket] = queue.Queue()
    save = channel.server.expect_transfer(taken.put)
    with channel.open(channel.address.token.encode() + framed(OpenTransfer(save)) + b"and more") as worker:
        assert receive(worker, Admitted) == Admitted()
        with taken.get(timeout=5) as connection:
            assert connection.recv(100) == b"and more" and connection.gettimeout() is None
    channel.server.end_transfer(save)
    for unknown in (save, "0" * 32):
        with pytest.raises(connection_rejected(), match="the transfer has ended"):
            connect(channel.address, OpenTransfer(unknown))


def connection_rejected() -> type[Exception]:
    return connection.RejectedError


# -- transfers of a state -----------------------------------------------------------------------------


@pytest.fixture
def transfer(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Transfer]:
    monkeypatch.setattr(control_server, "PART_EVERY_S", 0.0)
    with closing(Transfer(channel.server)) as transfer:
        yield transfer


def opened(channel: Channel, transfer: Transfer, first: Message, size: int = 0) -> socket.socket:
    worker = connect(channel.address, OpenTransfer(transfer.name))
    worker.sendall(framed(first, size))
    return worker


def test_a_state_is_passed_on_while_it_arrives(channel: Channel, transfer: Transfer) -> None:
    with opened(channel, transfer, TakeState("b")) as taker, opened(channel, transfer, GiveState("a"), 4) as giver:
        giver.sendall(b"st")
        assert receive_message(taker) == (State(), 4)
        assert taker.recv(4) == b"st"
        giver.sendall(b"at")
        assert taker.recv(4) == b"at" and receive(giver, Received) == Received()
        assert bytes(transfer.data) == b"stat"
    assert {channel.next(PartReceived).worker for _ in range(4)} == {"a", "b"}, "both make progress"


@pytest.mark.parametrize("size", [0, 1, 9_000_000])
def test_all_who_take_a_state_get_it_whole(channel: Channel, transfer: Transfer, size: int) -> None:
    state = random.Random(size).randbytes(size)
    with ThreadPoolExecutor() as pool:
        early = [pool.submit(take, channel.address, name, transfer.name) for name in "bc"]
        Giving(channel.address, "a", transfer.name).send(state)
        late = take(channel.address, "d", transfer.name)
        assert bytes(late) == bytes(transfer.data) == state
        assert all(bytes(each.result()) == state for each in early)


def test_the_driver_can_give_a_state_itself(channel: Channel, transfer: Transfer) -> None:
    transfer.fill(b"state")
    assert take(channel.address, "b", transfer.name) == b"state"


def test_nobody_gets_a_part_of_a_state(channel: Channel, transfer: Transfer) -> None:
    """The worker that gives it dies; another one takes only after that."""
    with ThreadPoolExecutor() as pool:
        taken = pool.submit(take, channel.address, "b", transfer.name)
        with opened(channel, transfer, GiveState("a"), 4) as giver:
            giver.sendall(b"st")
            channel.next(PartReceived)
        for wait in (taken.result, lambda: take(channel.address, "c", transfer.name)):
            with pytest.raises(ConnectionError):
                wait()


def test_a_transfer_that_is_closed_ends_for_all(channel: Channel, transfer: Transfer) -> None:
    with ThreadPoolExecutor() as pool, opened(channel, transfer, GiveState("a"), 4) as giver:
        taken = pool.submit(take, channel.address, "b", transfer.name)
        channel.next(PartReceived)
        transfer.close()
        with pytest.raises(ConnectionError):
            taken.result()
        with pytest.raises(ConnectionError):
            receive(giver, Received)


def test_a_state_is_given_once(channel: Channel, transfer: Transfer) -> None:
    Giving(channel.address, "a", transfer.name).send(b"state")
    with pytest.raises(ConnectionError):
        Giving(channel.address, "b", transfer.name).send(b"other")
    assert bytes(transfer.data) == b"state"


# -- clients without the token ------------------------------------------------------------------------


def test_a_client_without_the_token_is_refused(channel: Channel) -> None:
    hello = framed(Hello("w", "n", 1))
    for sent in (
        b"0" * 32,
        b"0" * 32 + hello,
        b"\xff" * 64,
        b"[" * 5000,
        b"GET / HTTP/1.1\r\nHost: example\r\n\r\n",
        hello,
    ):
        with channel.open(sent) as client:
            assert ended(client)
    assert channel.events.empty()


def test_a_token_may_arrive_byte_by_byte(channel: Channel) -> None:
    with channel.open() as worker:
        worker.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in channel.address.token.encode() + framed(Hello("w", "n", 1)):
            worker.sendall(bytes([byte]))
        assert receive(worker, Admitted) and channel.next(WorkerStarted).worker == "w"


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"[" * 200_000,
        b"\xff\xfe",
        b'{"type": "Hello", "worker": "w"}',
        encode(Hello("there", "n", 1)),
        encode(Alive()),
        encode(REPORT),
    ],
)
def test_a_first_message_of_another_type_ends_its_connection_only(channel: Channel, header: bytes) -> None:
    """This also applies to clients with the token."""
    with channel.greet("there"):
        channel.next(WorkerStarted)
        with channel.open(channel.address.token.encode() + PREFIX.pack(len(header), 0) + header) as other:
            assert ended(other)
        assert channel.server.send("there", ConfirmBoundary()), "the worker that was connected before is served"
    assert channel.next(WorkerEnded).worker == "there"


def test_a_connection_that_is_not_admitted_in_time_is_closed(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_server, "ADMISSION_S", 0.3)
    token = channel.address.token.encode()
    for sent in (b"", b"0" * 31, token, token + PREFIX.pack(100, 0)):
        with channel.open(sent) as late:
            assert ended(late)
    with channel.open() as slow, pytest.raises(OSError):
        for byte in token * 100:
            slow.sendall(bytes([byte]))
            time.sleep(0.05)
    with channel.greet():
        channel.next(WorkerStarted)
        time.sleep(0.5)
        assert channel.server.send("w", ConfirmBoundary()), "an admitted worker may be silent"


def test_a_limited_number_of_connections_waits_for_admission(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_server, "UNADMITTED_AT_MOST", 3)
    silent = [channel.open() for _ in range(5)]
    assert ended(silent[0]) and ended(silent[1]), "the oldest ones are closed"
    with channel.greet():
        channel.next(WorkerStarted)
        silent[4].setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[4].recv(1)
    for each in silent:
        each.close()


def test_a_worker_is_admitted_among_many_silent_clients(channel: Channel) -> None:
    silent = [channel.open() for _ in range(300)]
    channel.client()
    assert channel.next(WorkerStarted).worker == "w"
    channel.server.disconnect("w")
    for each in silent:
        each.close()


def test_a_refused_worker_tries_again(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the driver is flooded with connections, it may close that of a worker before the worker is admitted."""
    first_message, tries = channel.server._first_message, []

    async def first_refused(peer: Any) -> Message:
        message = await first_message(peer)
        tries.append(message)
        if len(tries) == 1:
            raise ValueError("planned")
        return message

    monkeypatch.setattr(channel.server, "_first_message", first_refused)
    channel.client()
    assert channel.next(WorkerStarted).worker == "w" and len(tries) == 2
    channel.server.disconnect("w")


def test_a_client_gives_up_on_another_kind_of_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=lambda: [listener.accept()[0].close() for _ in range(2)], daemon=True).start()
        with pytest.raises(ConnectionAbortedError, match="another process has that port"):
            connect(ControlAddress("127.0.0.1", listener.getsockname()[1], "0" * 32), Alive(), patience_s=0.2)


def test_without_a_descriptor_the_server_waits_and_continues(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control thread does not accept connections meanwhile."""
    monkeypatch.setattr(control_server, "ACCEPT_PAUSE_S", 0.2)
    tries: list[float] = []

    class Exhausted:
        def accept(self) -> Any:
            tries.append(time.monotonic())
            raise OSError(24, "too many open files")

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    real = channel.server._listener
    with monkeypatch.context() as patch:
        patch.setattr(channel.server, "_listener", Exhausted())
        opened = channel.open()
        wait_for(lambda: len(tries) > 1)
    assert tries[1] - tries[0] >= 0.15
    channel.client()
    assert channel.next(WorkerStarted).worker == "w"
    opened.close()
    channel.server.disconnect("w")


def test_refused_connections_are_counted_instead_of_listed(channel: Channel, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(30):
        with channel.open(b"0" * 32) as client:
            assert ended(client)
    wait_for(lambda: channel.server._refusals._others == 25)
    lines = [record for record in caplog.records if "refused a connection" in record.getMessage()]
    assert len(lines) == control_server.LOG_LINES
    channel.server._refusals._until = 0.0
    wait_for(lambda: any("refused 25 more" in record.getMessage() for record in caplog.records))


def test_a_closed_server_leaves_nothing(channel: Channel) -> None:
    channel.client()
    channel.next(WorkerStarted)
    bulk = connect(channel.address, OpenBulk("w"))
    channel.server.close()
    assert ended(bulk)
    bulk.close()
    wait_for(lambda: not [each for each in threading.enumerate() if each.name.startswith("raysgd-bulk")])
    with pytest.raises(ConnectionRefusedError):
        channel.open()
    channel.server.close()


@pytest.mark.parametrize(("expected", "closed"), [(0, True), (100, False)])
def test_all_expected_workers_can_connect_at_once(expected: int, closed: bool) -> None:
    """None of these connections has sent its first message yet."""
    server = ControlServer(queue.SimpleQueue(), "127.0.0.1")
    server.expected_workers = expected
    connections = []
    try:
        for _ in range(140):
            connections.append(socket.create_connection(server.address, timeout=10))
        connections[0].settimeout(10 if closed else 0.5)
        if closed:
            assert connections[0].recv(1) == b""
        else:
            wait_for(lambda: len(server._unadmitted) == 140)
            with pytest.raises(TimeoutError):
                connections[0].recv(1)
    finally:
        for connection in connections:
            connection.close()
        server.close()


def test_the_ports_of_the_driver_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each trainer in the script takes the next one. If there is none, the error says what to do."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("RAYSGD_CONTROL_PORT", f"{port}")
        with pytest.raises(ConfigError, match=r"RAYSGD_CONTROL_PORT allows is in use.*set a range"):
            ControlServer(queue.SimpleQueue(), "127.0.0.1")
        monkeypatch.setenv("RAYSGD_CONTROL_PORT", f"{port}-{port + 20}")
        servers = [ControlServer(queue.SimpleQueue(), "127.0.0.1") for _ in range(2)]
    numbers = [server.address[1] for server in servers]
    for server in servers:
        server.close()
    assert port < numbers[0] < numbers[1] <= port + 20


def test_a_worker_that_cannot_connect_says_to_which_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    where = f"cannot connect to the script's machine at 127.0.0.1:{port} .*a firewall.*RAYSGD_CONTROL_PORT"
    with pytest.raises(ConnectionError, match=where):
        ControlClient(ControlAddress("127.0.0.1", port, "t" * TOKEN_BYTES), "w", "node", lambda: None)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system has no TCP_USER_TIMEOUT")
def test_a_worker_notices_that_the_drivers_machine_is_cut_off(channel: Channel) -> None:
    """After as long as the driver waits for a worker's machine. The end of the connection ends the worker."""
    channel.server.unreachable_s = 7.0
    with channel.greet() as opened:
        assert opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000
        assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_the_limit_of_a_large_message_is_for_a_standstill() -> None:
    """The reader takes a part every 0.1 s, so that all of it takes longer than the limit."""
    one, other = socket.socketpair()
    one.settimeout(0.5)
    body = bytes(8 << 20)

    def read() -> None:
        left = len(framed(Received(), len(body))) + len(body)
        while left:
            left -= len(other.recv(1 << 19))
            time.sleep(0.1)

    with one, other:
        reader = threading.Thread(target=read)
        reader.start()
        send(one, Received(), body)
        reader.join(60)
        assert not reader.is_alive()


def test_a_slow_snapshot_is_progress_of_its_worker(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_server, "PART_EVERY_S", 0.0)
    with connect(channel.address, OpenBulk("w")) as bulk:
        frame = framed(SnapshotUpload(Progress(), 1), 2)
        bulk.sendall(frame + b"x")  # the rest is on its way
        assert channel.next(PartReceived) == PartReceived("w")
