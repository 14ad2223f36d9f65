"""The contract of the control channel: what the driver and its workers can rely on, and what nobody else can do to it."""

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
from typing import Any

import numpy as np
import pytest

from raysgd.core import connection
from raysgd.core.connection import PREFIX, ControlAddress, connect, framed, receive, receive_body, receive_message, send
from raysgd.core.messages import (
    Admitted,
    Alive,
    BoundaryAnswer,
    ConfirmBoundary,
    FunctionReport,
    Hello,
    Interrupt,
    KillProcess,
    Message,
    MessageError,
    OpenBulk,
    OpenCheckpoint,
    PreemptionNotice,
    ProgressReport,
    ProposeBoundary,
    Received,
    SnapshotUpload,
    StackReport,
    StackRequest,
    StartDealer,
    decode,
    encode,
)
from raysgd.core.outcomes import Ok
from raysgd.core.progress import Control, Progress
from raysgd.core.protocols import Call
from raysgd.core.ranks import SingleWorkerBackend
from raysgd.workers import control_server
from raysgd.workers.blob import Blob
from raysgd.workers.control_client import ControlClient, brief
from raysgd.workers.control_server import ControlServer
from raysgd.workers.events import Event, MessageReceived, WorkerEnded, WorkerStarted
from raysgd.workers.replica_host import ReplicaHost

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
        StackReport(1, ()),
        REPORT,
        Alive(),
        Hello("w", "node", 1),
    ],
)
def test_what_is_decoded_is_what_was_encoded(message: Message) -> None:
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
def test_anything_else_is_refused(header: bytes) -> None:
    with pytest.raises(MessageError, match="not a raysgd control message"):
        decode(header)


def test_numpys_numbers_become_pythons() -> None:
    numpy = pytest.importorskip("numpy")
    decoded = decode(encode(ProgressReport(1, Progress(step=numpy.int64(3)), {"loss": numpy.float32(0.5)})))
    assert decoded == ProgressReport(1, Progress(step=3), {"loss": 0.5})
    with pytest.raises(TypeError, match="cannot be part of a control message"):
        encode(ProgressReport(1, Progress(), {"loss": object()}))


# -- framing ------------------------------------------------------------------------------------------


def test_bodies_arrive_whole() -> None:
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


needs_fallocate = pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system sets no room aside")


@needs_fallocate
def test_large_bodies_lie_in_a_file_and_not_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LARGE", 100_000)
    one, other = socket.socketpair()
    with one, other:
        bodies = [random.Random(n).randbytes(size) for n, size in enumerate([300_000, 99_999])]
        for body in bodies:
            threading.Thread(target=send, args=(one, Received(), body), daemon=True).start()
            held = receive_body(other, receive_message(other)[1])
            assert isinstance(held, mmap.mmap if body is bodies[0] else bytearray)
            assert bytes(held) == body
            assert pickle.loads(pickle.dumps(Blob(held), 5)).data == body, "it can go on to a worker"


@needs_fallocate
def test_without_room_for_a_file_it_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(connection, "LARGE", 100)
    monkeypatch.setattr(os, "posix_fallocate", full)
    one, other = socket.socketpair()
    with one, other:
        send(one, Received(), bytes(200))
        assert receive_body(other, receive_message(other)[1]) == bytearray(200)


# -- a driver and its workers -------------------------------------------------------------------------


class Desk:
    """A server with its events, and clients of it."""

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
        """A worker's control connection, made by hand."""
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
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.server.close()


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


def test_a_worker_arrives_and_obeys(desk: Desk) -> None:
    client = desk.client()
    assert desk.next(WorkerStarted) == WorkerStarted("w", "node", os.getpid())
    client.call, client.generation = 7, 2
    desk.server.send("w", ProposeBoundary(round=1, call=7, step=5))
    assert desk.next(MessageReceived).message == BoundaryAnswer(round=1, accepted=True, begun=0)
    desk.server.send("w", ProposeBoundary(round=2, call=6, step=5))
    assert desk.next(MessageReceived).message == BoundaryAnswer(2, False, -1), "an order for another call is refused"
    desk.server.send("w", Interrupt(1))
    desk.server.send("w", StackRequest(3))
    assert any("test_channel.py" in frame for frame in desk.next(MessageReceived).message.frames)
    assert not client.control.interrupted and not desk.aborted, "an order of an old generation means nothing"
    desk.server.send("w", Interrupt(2))
    wait_for(lambda: desk.aborted == ["w"] and client.control.interrupted)
    client.notice()
    assert desk.next(MessageReceived).message == PreemptionNotice()
    client.control.report(Progress(step=4), {"loss": 0.5, "table": [1]})
    assert desk.next(MessageReceived).message == ProgressReport(7, Progress(step=4), {"loss": 0.5})
    desk.server.disconnect("w")


class Stepping:
    """A replica that wants to begin step 6."""

    progress = Progress()

    def __init__(self, rank_info: Any, control: Control) -> None:
        self.control = control

    def run(self, call: Call) -> bool:
        return self.control.begin(6)


def test_a_stop_that_was_agreed_on_before_the_work_began_is_kept(desk: Desk) -> None:
    """The driver asks as soon as the call is sent; the main thread may still be fetching its arguments."""
    client = desk.client()
    host = ReplicaHost(SingleWorkerBackend(), client.control, remote=False)
    host.perform("build", {"factory": Stepping, "rank_info": None})
    desk.next(WorkerStarted)
    client.begin(7)
    desk.server.send("w", ProposeBoundary(1, 7, 5))
    assert desk.next(MessageReceived).message.accepted
    desk.server.send("w", ConfirmBoundary())
    stopped = host.perform("run", {"call": Call(Stepping.run)})
    assert isinstance(stopped, Ok) and stopped.value is False
    client.begin(8)
    free = host.perform("run", {"call": Call(Stepping.run)})
    assert isinstance(free, Ok) and free.value is True, "it was asked of another call"
    desk.server.disconnect("w")


def test_the_end_of_a_connection_is_an_event_at_once_and_once(desk: Desk) -> None:
    with desk.greet():
        desk.next(WorkerStarted)
        began = time.monotonic()
    gone = desk.next(WorkerEnded)
    assert time.monotonic() - began < 0.5
    assert "process ended" in gone.cause and gone.reason == "worker death"
    assert not desk.server.send("w", ConfirmBoundary())
    assert desk.events.empty()


def test_the_end_of_a_worker_that_was_dismissed_is_no_event(desk: Desk) -> None:
    desk.client()
    desk.next(WorkerStarted)
    desk.server.disconnect("w")
    time.sleep(0.1)
    assert desk.events.empty()


def test_late_messages_of_a_worker_that_was_dismissed_are_dropped(desk: Desk) -> None:
    with desk.greet() as worker:
        desk.next(WorkerStarted)
        desk.server.disconnect("w")
        send(worker, PreemptionNotice())
        desk.client("next")
        assert desk.next(WorkerStarted).worker == "next", "the server serves others"
    desk.server.disconnect("next")
    assert desk.events.empty()


def test_silence_is_measured_from_the_last_message(desk: Desk) -> None:
    assert desk.server.silent_for("nobody") == 0.0
    with desk.greet() as worker:
        desk.next(WorkerStarted)
        time.sleep(0.3)
        assert desk.server.silent_for("w") >= 0.3
        send(worker, Alive())
        wait_for(lambda: desk.server.silent_for("w") < 0.2)


def test_a_worker_that_never_reads_does_not_hold_the_driver_up(desk: Desk) -> None:
    with desk.greet() as worker:
        desk.next(WorkerStarted)
        deadline = time.monotonic() + 30
        while desk.server.send("w", StartDealer("x" * 5000)):
            assert time.monotonic() < deadline
        gone = desk.next(WorkerEnded)
        assert gone.reason == "network" and "has not read" in gone.cause
        assert worker.fileno() >= 0


def test_an_unreachable_machine_is_noticed(desk: Desk) -> None:
    """Pulled cables are tried in tests/network; here, that every connection is set to notice them."""
    desk.server.unreachable_s = 10.0
    desk.client()
    desk.next(WorkerStarted)
    server_end = desk.server._workers["w"].connection
    assert server_end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    limits = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 2, "TCP_USER_TIMEOUT": 10_000}
    for name, value in limits.items():
        if hasattr(socket, name):
            assert server_end.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) == value, name
    desk.server.disconnect("w")


def test_progress_messages_carry_short_values_only() -> None:
    assert brief(None) is None
    plain = {"epoch": 3, "loss": 0.5, "note": "fine", "done": True, "batch_count": 7, "num_samples": 28}
    other = {"long": "x" * 10_000, "nested": [[1]], "large": 2**70, 5: 1.0, "n" * 300: 1.0, "none": None}
    assert brief({**plain, **other}) == plain
    numpy = {"loss": np.float32(0.5), "epoch": np.int64(3), "best": np.bool_(True)}
    assert json.dumps(brief(numpy)) == '{"loss": 0.5, "epoch": 3}'
    many = brief({**{f"metric-{n}": float(n) for n in range(100_000)}, **plain})
    assert many is not None and len(json.dumps(many)) < 70_000 and len(many) > 1000
    assert (many["epoch"], many["batch_count"], many["num_samples"]) == (3, 7, 28), "counts always go"


# -- bulk connections ---------------------------------------------------------------------------------


def test_all_reports_and_snapshots_of_a_worker_use_one_connection(desk: Desk) -> None:
    client = desk.client()
    desk.next(WorkerStarted)
    body = random.Random(2).randbytes(3 << 20)
    for _ in range(5):
        client.deliver(REPORT, b"abc")
        heard = desk.next(MessageReceived)
        assert (heard.worker, heard.message, bytes(heard.body)) == ("w", REPORT, b"abc")
    client.upload(SnapshotUpload(Progress(step=1), 2, {"loss": 1.0, "table": [1]}), body)
    heard = desk.next(MessageReceived)
    assert heard.body == body and heard.message == SnapshotUpload(Progress(step=1), 2, {"loss": 1.0})
    client.deliver(StartDealer("d"), b"")
    assert desk.next(MessageReceived).message == StartDealer("d")
    assert desk.accepted == [OpenBulk("w")]
    desk.server.disconnect("w")


def test_a_large_body_does_not_delay_the_control_connection(desk: Desk) -> None:
    client = desk.client()
    desk.next(WorkerStarted)
    sender = threading.Thread(target=client.deliver, args=(REPORT, bytes(300 << 20)), daemon=True)
    sender.start()
    answered = 0
    while sender.is_alive():
        desk.server.send("w", StackRequest(answered))
        while not isinstance(desk.next(MessageReceived).message, StackReport):
            continue
        answered += 1
    assert answered > 2, "the worker received and answered requests while its body was on the way"
    desk.server.disconnect("w")


def test_a_delivery_that_does_not_arrive_is_an_error_and_the_next_one_works(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = desk.client()

    def full(opened: socket.socket, size: int) -> bytearray:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(control_server, "receive_body", full)
        with pytest.raises(ConnectionError):
            client.deliver(REPORT, b"abc")
    client.deliver(REPORT, b"abc")
    assert desk.next(MessageReceived).message == REPORT
    assert desk.accepted == [OpenBulk("w")] * 2
    desk.server.disconnect("w")


def test_a_bulk_connection_that_has_ended_meanwhile_is_opened_again(desk: Desk) -> None:
    client = desk.client()
    client.deliver(REPORT, b"abc")
    for each in list(desk.server._handed_over):
        each.shutdown(socket.SHUT_RDWR)
    wait_for(lambda: not desk.server._handed_over)
    client.deliver(REPORT, b"def")
    assert [bytes(desk.next(MessageReceived).body) for _ in range(2)] == [b"abc", b"def"]
    desk.server.disconnect("w")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_reports_over_a_connection_of_its_own(desk: Desk) -> None:
    client = desk.client()
    client.deliver(REPORT, b"parent")
    with client._bulk_lock:  # another thread may be sending at that moment
        child = os.fork()
        if child == 0:
            try:
                client.deliver(REPORT, b"child")
            finally:
                os._exit(0)
    client.deliver(REPORT, b"parent again")
    os.waitpid(child, 0)
    bodies = sorted(bytes(desk.next(MessageReceived).body) for _ in range(3))
    assert bodies == [b"child", b"parent", b"parent again"]
    assert desk.accepted == [OpenBulk("w")] * 2
    desk.server.disconnect("w")


def test_a_message_that_cannot_be_carried_out_does_not_end_the_workers_thread(
    desk: Desk, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise OSError(24, "too many open files")

    client = ControlClient(desk.address, "w", "node", fails)
    desk.next(WorkerStarted)
    desk.server.send("w", Interrupt(1))
    desk.server.send("w", StackRequest(5))
    assert desk.next(MessageReceived).message.round == 5
    assert "Interrupt could not be carried out" in caplog.text and client.control.interrupted
    desk.server.disconnect("w")


@pytest.mark.parametrize("size", [2**62, 2**64 - 1])
@pytest.mark.parametrize("first", [Hello("w", "n", 1), OpenBulk("w")])
def test_a_body_without_room_ends_its_connection_only(desk: Desk, first: Message, size: int) -> None:
    with connect(desk.address, first) as worker:
        worker.sendall(framed(REPORT, size))
        assert ended(worker)
    if isinstance(first, Hello):
        gone = desk.next(WorkerEnded)
        assert gone.worker == "w" and gone.reason == "network" and "a body of" in gone.cause
    desk.client("next")
    assert desk.next(WorkerStarted).worker == "next"
    desk.server.disconnect("next")


def test_control_messages_on_a_bulk_connection_end_it(desk: Desk) -> None:
    with connect(desk.address, OpenBulk("w")) as bulk:
        send(bulk, PreemptionNotice())
        assert ended(bulk)
    assert desk.events.empty()


# -- checkpoint connections ---------------------------------------------------------------------------


def test_a_checkpoint_connection_goes_to_who_expects_it(desk: Desk) -> None:
    """What was sent behind the first message is left in it."""
    taken: queue.Queue[socket.socket] = queue.Queue()
    save = desk.server.expect_checkpoint(taken.put)
    with desk.open(desk.address.token.encode() + framed(OpenCheckpoint(save)) + b"and more") as worker:
        assert receive(worker, Admitted) == Admitted()
        with taken.get(timeout=5) as connection:
            assert connection.recv(100) == b"and more" and connection.gettimeout() is None
    desk.server.end_checkpoint(save)
    for unknown in (save, "0" * 32):
        with pytest.raises(connection_rejected(), match="the save has ended"):
            connect(desk.address, OpenCheckpoint(unknown))


def connection_rejected() -> type[Exception]:
    return connection.RejectedError


# -- clients without the token ------------------------------------------------------------------------


def test_a_stranger_is_refused(desk: Desk) -> None:
    hello = framed(Hello("w", "n", 1))
    for sent in (
        b"0" * 32,
        b"0" * 32 + hello,
        b"\xff" * 64,
        b"[" * 5000,
        b"GET / HTTP/1.1\r\nHost: example\r\n\r\n",
        hello,
    ):
        with desk.open(sent) as stranger:
            assert ended(stranger)
    assert desk.events.empty()


def test_a_token_may_come_in_pieces(desk: Desk) -> None:
    with desk.open() as worker:
        worker.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in desk.address.token.encode() + framed(Hello("w", "n", 1)):
            worker.sendall(bytes([byte]))
        assert receive(worker, Admitted) and desk.next(WorkerStarted).worker == "w"


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
def test_a_first_message_of_another_type_ends_its_connection_only(desk: Desk, header: bytes) -> None:
    """Even with the right token."""
    with desk.greet("there"):
        desk.next(WorkerStarted)
        with desk.open(desk.address.token.encode() + PREFIX.pack(len(header), 0) + header) as other:
            assert ended(other)
        assert desk.server.send("there", ConfirmBoundary()), "the one that was there is served"
    assert desk.next(WorkerEnded).worker == "there"


def test_a_connection_that_is_not_admitted_in_time_is_closed(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_server, "ADMISSION_S", 0.3)
    token = desk.address.token.encode()
    for sent in (b"", b"0" * 31, token, token + PREFIX.pack(100, 0)):
        with desk.open(sent) as late:
            assert ended(late)
    with desk.open() as slow, pytest.raises(OSError):
        for byte in token * 100:
            slow.sendall(bytes([byte]))
            time.sleep(0.05)
    with desk.greet():
        desk.next(WorkerStarted)
        time.sleep(0.5)
        assert desk.server.send("w", ConfirmBoundary()), "an admitted worker may be silent"


def test_only_so_many_wait_for_admission(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_server, "UNADMITTED_AT_MOST", 3)
    silent = [desk.open() for _ in range(5)]
    assert ended(silent[0]) and ended(silent[1]), "the oldest make room"
    with desk.greet():
        desk.next(WorkerStarted)
        silent[4].setblocking(False)
        with pytest.raises(BlockingIOError):
            silent[4].recv(1)
    for each in silent:
        each.close()


def test_a_worker_is_admitted_among_many_silent_clients(desk: Desk) -> None:
    silent = [desk.open() for _ in range(300)]
    began = time.monotonic()
    desk.client()
    assert desk.next(WorkerStarted).worker == "w" and time.monotonic() - began < 3
    desk.server.disconnect("w")
    for each in silent:
        each.close()


def test_a_refused_worker_tries_again(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of connections may push out a worker before it is admitted."""
    first_message, tries = desk.server._first_message, []

    async def first_refused(peer: Any) -> Message:
        message = await first_message(peer)
        tries.append(message)
        if len(tries) == 1:
            raise ValueError("planned")
        return message

    monkeypatch.setattr(desk.server, "_first_message", first_refused)
    desk.client()
    assert desk.next(WorkerStarted).worker == "w" and len(tries) == 2
    desk.server.disconnect("w")


def test_a_client_does_not_wait_for_ever_for_another_kind_of_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=lambda: [listener.accept()[0].close() for _ in range(2)], daemon=True).start()
        with pytest.raises(ConnectionAbortedError, match="another process has that port"):
            connect(ControlAddress("127.0.0.1", listener.getsockname()[1], "0" * 32), Alive(), patience_s=0.2)


def test_without_a_descriptor_it_waits_and_goes_on(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control thread sleeps meanwhile, and reports it once."""
    monkeypatch.setattr(control_server, "ACCEPT_PAUSE_S", 0.2)
    tries: list[float] = []

    class Exhausted:
        def accept(self) -> Any:
            tries.append(time.monotonic())
            raise OSError(24, "too many open files")

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    real = desk.server._listener
    with monkeypatch.context() as patch:
        patch.setattr(desk.server, "_listener", Exhausted())
        opened = desk.open()
        wait_for(lambda: len(tries) > 1)
    assert tries[1] - tries[0] >= 0.15
    desk.client()
    assert desk.next(WorkerStarted).worker == "w"
    opened.close()
    desk.server.disconnect("w")


def test_refused_connections_are_counted_instead_of_listed(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(30):
        with desk.open(b"0" * 32) as stranger:
            assert ended(stranger)
    wait_for(lambda: desk.server._refusals._others == 25)
    lines = [record for record in caplog.records if "refused a connection" in record.getMessage()]
    assert len(lines) == control_server.LOG_LINES
    desk.server._refusals._until = 0.0
    wait_for(lambda: any("refused 25 more" in record.getMessage() for record in caplog.records))


def test_a_closed_server_leaves_nothing(desk: Desk) -> None:
    desk.client()
    desk.next(WorkerStarted)
    bulk = connect(desk.address, OpenBulk("w"))
    desk.server.close()
    assert ended(bulk)
    bulk.close()
    wait_for(lambda: not [each for each in threading.enumerate() if each.name.startswith("raysgd-bulk")])
    with pytest.raises(ConnectionRefusedError):
        desk.open()
    desk.server.close()
