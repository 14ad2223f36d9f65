"""The contract of the control channel: what the driver and its workers rely on, and what other clients cannot do."""

import contextlib
import json
import mmap
import os
import pickle
import queue
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import pytest

from raysgd.core.channel import connection
from raysgd.core.channel.blobs import Blob
from raysgd.core.channel.connection import Connection, ControlAddress, connect
from raysgd.core.channel.frames import (
    DRIVER,
    GREETING,
    KEY_BYTES,
    NUMBER_BYTES,
    PROOF_BYTES,
    WORKER,
    framed,
    new_number,
    proof,
    taken,
)
from raysgd.core.channel.messages import (
    Alive,
    BoundaryAnswer,
    CallAnswer,
    ConfirmBoundary,
    FunctionReport,
    GiveState,
    Hello,
    Interrupt,
    KillProcess,
    Message,
    Moved,
    Open,
    PerformCall,
    PreemptionNotice,
    ProgressReport,
    ProposeBoundary,
    Received,
    SnapshotUpload,
    StackReport,
    StackRequest,
    StartDealer,
)
from raysgd.core.control import Control
from raysgd.core.decisions import lease
from raysgd.core.measures.metrics import Measured, brief
from raysgd.core.measures.progress import Progress
from raysgd.core.outcomes import Failed, Ok
from raysgd.core.protocols import Call, SingleWorkerBackend
from raysgd.errors import ConfigError
from raysgd.workers import control_client, orphan
from raysgd.workers.calls import SMALL, PickledObject, open_answer, pickle_in_parts, unpickle_parts
from raysgd.workers.control_client import ControlClient
from raysgd.workers.control_server import UNADMITTED_AT_MOST, ControlServer
from raysgd.workers.events import CallEnded, MessageReceived, WorkerEnded, WorkerStarted
from raysgd.workers.orphan import DriverContact
from raysgd.workers.replica_host import ReplicaHost
from raysgd.workers.transfer import Giving, Transfer, ask, take
from tests.traffic import Events, Tap

REPORT = FunctionReport("report", run=1, attempt=2, rank=3, metrics_size=3, has_checkpoint=False)


# -- framing ------------------------------------------------------------------------------------------


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    """Return a worker's and the driver's end of a connection."""
    one, other = socket.socketpair()
    with one, other:
        yield Connection(one), Connection(other)


Ends = tuple[Connection, Connection]


def test_messages_that_arrive_together_or_in_pieces() -> None:
    received, messages = bytearray(), []
    for byte in b"".join(framed(KillProcess(n)) for n in range(3)):
        received.append(byte)
        messages += taken(received)
    assert messages == [KillProcess(n) for n in range(3)] and not received
    received += framed(KillProcess(3)) + framed(KillProcess(4))
    assert list(taken(received)) == [KillProcess(3), KillProcess(4)]


def test_bodies_arrive_completely(ends: Ends) -> None:
    worker, driver = ends
    parts = [random.Random(n).randbytes(size) for n, size in enumerate([100, 9_000_000, 0, 1, 70_000])]
    body = b"".join(parts)

    def send_all() -> None:
        worker.send(KillProcess(1), *parts)
        worker.send(KillProcess(2))
        worker.socket.close()

    threading.Thread(target=send_all, daemon=True).start()
    message, size = driver.receive()
    assert message == KillProcess(1) and driver.receive_body(size) == body
    assert driver.expect(KillProcess) == KillProcess(2)
    with pytest.raises(ConnectionError):
        driver.receive()


needs_fallocate = pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="this system has no posix_fallocate")


def received(ends: Ends, content: bytes) -> Any:
    worker, driver = ends
    threading.Thread(target=worker.send, args=(KillProcess(1), content), daemon=True).start()
    return driver.receive_body(driver.receive()[1])


@needs_fallocate
def test_large_bodies_are_in_a_file_and_not_in_memory(ends: Ends) -> None:
    content = random.Random(1).randbytes(connection.LARGE)
    held = received(ends, content)
    assert isinstance(held, mmap.mmap) and held[:] == content
    assert len(pickle.loads(pickle.dumps(Blob(held), 5)).data) == connection.LARGE, "the body can be sent to a worker"
    assert isinstance(received(ends, content[1:]), bytearray)


@needs_fallocate
def test_without_room_for_a_file_the_body_is_in_memory(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    content = random.Random(1).randbytes(connection.LARGE)
    assert received(ends, content) == bytearray(content)


class SlowSocket:
    """Takes a part within each limit. As in a real one, the limit of `sendall` is for everything together."""

    taken = 0

    def send(self, data: memoryview) -> int:
        self.taken += min(len(data), 1 << 19)
        return min(len(data), 1 << 19)

    def sendall(self, data: memoryview) -> None:
        if self.send(data) < len(data):
            raise TimeoutError


def test_the_limit_of_a_large_message_is_for_a_standstill() -> None:
    slow: Any = SlowSocket()
    Connection(slow).send(Received(), bytes(8 << 20))
    assert slow.taken > 8 << 20


# -- a driver and its workers -------------------------------------------------------------------------


WAIT_S = 60.0  # for what happens at once, on a machine with nothing else to do


class Channel:
    """A control server with its events, and its clients."""

    def __init__(self, **limits: Any) -> None:
        self.events = Events()
        self.server = ControlServer(self.events, "127.0.0.1", **limits)
        self.aborted: list[str] = []
        self.dismissed: list[str] = []

    @property
    def address(self) -> ControlAddress:
        return self.server.address_for_workers()

    def client(self, worker: str = "w", *, through: Tap | None = None, orphan_s: float = 0.0) -> ControlClient:
        address = self.address if through is None else through.address
        dismissed = partial(self.dismissed.append, worker)
        return ControlClient(
            address, worker, "node", partial(self.aborted.append, worker), dismissed, orphan_s=orphan_s
        )

    def greet(self, worker: str = "w") -> Connection:
        """Open a worker's control connection without a client."""
        return connect(self.address, Hello(worker, "n", 1))

    def open(self, sent: bytes = b"") -> socket.socket:
        opened = socket.create_connection(self.server.address, timeout=WAIT_S)
        opened.sendall(sent)
        return opened

    def next(self, kind: type, *, moved: bool = False) -> Any:
        """Return the next event of this kind; a `Moved`, which a slow machine makes, only if `moved`."""
        while True:
            event = self.events.get(timeout=WAIT_S)
            if isinstance(event, kind) and isinstance(getattr(event, "message", None), Moved) == moved:
                return event


@pytest.fixture
def channel() -> Iterator[Channel]:
    channel = Channel(admission_s=10 * WAIT_S)
    yield channel
    channel.server.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ended(opened: socket.socket) -> bool:
    """Wait until the other end closes the connection."""
    try:
        while opened.recv(1 << 16):
            continue
        return True
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
    client.control.report(Progress(step=4), Measured({"loss": 0.5, "table": [1]}))
    assert channel.next(MessageReceived).message == ProgressReport(7, Progress(step=4), Measured({"loss": 0.5}))
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


def test_late_messages_of_a_worker_that_was_dismissed_are_dropped(channel: Channel) -> None:
    with channel.greet() as worker:
        channel.next(WorkerStarted)
        channel.server.disconnect("w")
        worker.send(PreemptionNotice())
        channel.client("next")
        assert channel.next(WorkerStarted).worker == "next", "the server still serves others"
    channel.server.disconnect("next")
    assert channel.events.empty()


def test_a_worker_that_never_reads_does_not_block_the_driver(channel: Channel) -> None:
    with channel.greet() as worker:
        channel.next(WorkerStarted)
        deadline = time.monotonic() + 30
        while channel.server.send("w", StartDealer("x" * 5000)):
            assert time.monotonic() < deadline
        failure = channel.next(WorkerEnded)
        assert failure.reason == "network" and "has not read" in failure.cause
        assert worker.socket.fileno() >= 0


class Kind(str, Enum):
    NAME = "name"


class Level(int, Enum):
    TWO = 2


def test_progress_messages_contain_only_numbers() -> None:
    plain = {"epoch": 3, "loss": 0.5, "done": True, "batch_count": 7, "num_samples": 28}
    other = {"note": "fine", "nested": [[1]], "large": 2**70, 5: 1.0, "n" * 300: 1.0, "none": None}
    assert brief({**plain, **other}) == plain
    numpy = {"loss": np.float32(0.5), "epoch": np.int64(3), "best": np.bool_(True), "array": np.ones(2)}
    assert json.dumps(brief(numpy)) == '{"loss": 0.5, "epoch": 3}'
    own = brief({Kind.NAME: True, "f": np.float64(1.5), "level": Level.TWO})
    assert own == {"name": True, "f": 1.5, "level": 2}
    assert [type(each) for each in (*own, *own.values())] == [str] * 3 + [bool, float, int]
    many = brief({**{f"metric-{n}": float(n) for n in range(100_000)}, **plain})
    assert len(json.dumps(many)) < 100_000 and len(many) > 1000
    assert (many["epoch"], many["batch_count"], many["num_samples"]) == (3, 7, 28), "counts are always included"


# -- calls --------------------------------------------------------------------------------------------


def test_a_call_travels_over_a_control_connection_and_its_answer_back(channel: Channel) -> None:
    client = channel.client()
    channel.next(WorkerStarted)
    channel.server.send("w", PerformCall(7, 2, b"x" * 60_000))
    assert client.driver.calls.get(timeout=WAIT_S) == PerformCall(7, 2, b"x" * 60_000)
    client.answer(7, Ok(PickledObject(pickle.dumps([1, 2]))))
    assert open_answer(channel.next(MessageReceived)) == CallEnded("w", 7, Ok([1, 2]))
    channel.server.disconnect("w")


class LargeError(Exception):
    """An error that nearly no message could hold."""


@pytest.mark.parametrize("size", [SMALL - 1000, SMALL, 3_000_000, connection.LARGE])
def test_a_large_answer_travels_over_the_bulk_connection(channel: Channel, size: int) -> None:
    """Also an error, or a value with large parts. The next answer is small again."""
    client = channel.client()
    content = random.Random(size).randbytes(size)
    client.answer(1, Ok(PickledObject(pickle.dumps((content, [3])))))
    assert open_answer(channel.next(MessageReceived)) == CallEnded("w", 1, Ok((content, [3])))
    client.answer(2, Ok(Blob(memoryview(content))))
    end = open_answer(channel.next(MessageReceived))
    assert isinstance(end, CallEnded) and isinstance(end.outcome, Ok) and end.outcome.value.data == content
    client.answer(3, Failed(LargeError(content)))
    end = open_answer(channel.next(MessageReceived))
    assert isinstance(end, CallEnded) and isinstance(end.outcome, Failed) and end.outcome.error.args == (content,)
    client.answer(4, Ok())
    assert open_answer(channel.next(MessageReceived)) == CallEnded("w", 4, Ok())
    channel.server.disconnect("w")


def test_nothing_large_is_copied_to_be_sent() -> None:
    content = bytearray(SMALL)
    packed, large = pickle_in_parts({"one": Blob(content), "other": Blob(content), "small": Blob(b"x")}, pickle.dumps)
    assert len(packed) < 1000 and [each.obj for each in large] == [content, content] and large[0].obj is content
    assert {name: bytes(each.data) for name, each in unpickle_parts(packed, large).items()} == {
        "one": bytes(SMALL),
        "other": bytes(SMALL),
        "small": b"x",
    }
    assert pickle_in_parts(bytes(SMALL), pickle.dumps)[0] == b"", "it is not in a message"


def test_an_outcome_that_cannot_be_unpickled_is_a_failed_call() -> None:
    end = open_answer(MessageReceived("w", CallAnswer(3, b"no pickle")))
    assert isinstance(end, CallEnded) and end.call == 3 and isinstance(end.outcome, Failed)


def interrupted_at(line: int, function: Callable[[], Any]) -> bool:
    """Call the function, and press Ctrl-C in its nth line. Return whether it has so many."""
    left = line

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        left -= event == "line"
        if left < 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    with contextlib.suppress(KeyboardInterrupt):
        try:
            sys.settrace(trace)
            function()
        finally:
            sys.settrace(None)
    return left < 0


def test_ctrl_c_at_any_line_of_a_send_does_not_disturb_other_messages(channel: Channel) -> None:
    """They keep their order."""
    with channel.greet() as worker:
        channel.next(WorkerStarted)
        channel.server.send("w", StackRequest(-1))  # the first one of its type takes more lines
        assert worker.expect(StackRequest) == StackRequest(-1)
        line = 0
        while interrupted_at(line, partial(channel.server.send, "w", StackRequest(line))):
            line += 1
        assert line > 10
        rounds: list[int] = []
        while line not in rounds:
            rounds.append(worker.expect(StackRequest).round)
        assert rounds == sorted(set(rounds))


# -- bulk connections ---------------------------------------------------------------------------------


def test_all_reports_and_snapshots_of_a_worker_use_one_connection(channel: Channel) -> None:
    with Tap(channel.address) as tap:
        client = channel.client(through=tap)
        channel.next(WorkerStarted)
        for _ in range(5):
            client.deliver(REPORT, b"abc")
            received = channel.next(MessageReceived)
            assert (received.worker, received.message, bytes(received.body)) == ("w", REPORT, b"abc")
        parts = [bytes(10), bytes(2), random.Random(2).randbytes(3 << 20)]
        client.upload(SnapshotUpload(Progress(step=1), 2, Measured({"loss": 1.0, "table": [1]})), *parts)
        received = channel.next(MessageReceived)
        assert received.message == SnapshotUpload(Progress(step=1), 2, Measured({"loss": 1.0}))
        assert received.body == b"".join(parts)
        received.acknowledge()  # which only a report waits for: nothing is sent, and the connection stays idle
        time.sleep(0.05)
        client.deliver(StartDealer("d"), b"")
        assert channel.next(MessageReceived).message == StartDealer("d")
        assert len(tap.connections) == 2, "the control connection, and one more"
        channel.server.disconnect("w")
        wait_for(lambda: channel.dismissed == ["w"])


def test_a_report_waits_for_its_acknowledgement_and_for_no_other_message(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the rank must not continue, unless its generation ends. Its other threads are not held up."""
    monkeypatch.setattr(Events, "put", queue.SimpleQueue.put)
    client = channel.client()
    channel.next(WorkerStarted)
    for ends in (False, True):
        sender = threading.Thread(target=client.deliver, args=(REPORT, b"abc"), daemon=True)
        sender.start()
        report = channel.next(MessageReceived)
        channel.server.send("w", StackRequest(1))
        assert isinstance(channel.next(MessageReceived).message, StackReport)
        client.deliver(StartDealer("d"), b"")
        assert channel.next(MessageReceived).message == StartDealer("d")
        assert sender.is_alive()
        if ends:
            channel.server.send("w", Interrupt(1))
        else:
            report.acknowledge()
        sender.join(WAIT_S)
        assert not sender.is_alive()
    report.acknowledge()  # too late, and no error
    channel.server.disconnect("w")


def test_a_large_body_does_not_delay_the_control_connection(channel: Channel) -> None:
    client = channel.client()
    channel.next(WorkerStarted)
    sender = threading.Thread(target=client.deliver, args=(REPORT, bytes(150 << 20)), daemon=True)
    sender.start()
    answered = 0
    while sender.is_alive():
        channel.server.send("w", StackRequest(answered))
        while not isinstance(channel.next(MessageReceived).message, StackReport):
            continue
        answered += 1
    assert answered > 2, "the worker answered requests while its body was being sent"
    channel.server.disconnect("w")


def test_a_delivery_that_does_not_arrive_is_an_error_and_the_next_one_works(channel: Channel) -> None:
    """A new connection takes the place of one that a device between the machines has closed."""
    sent: list[bytes] = []

    def change(side: bytes, passed: list[bytes]) -> list[bytes]:
        first = len(tap.connections) == 2 and passed is tap.connections[1].worker
        if first and len(passed) == 4 and not sent:  # the first body
            sent.append(passed[-1])
            raise OSError
        return passed[-1:]

    with Tap(channel.address, change) as tap:
        client = channel.client(through=tap)
        channel.next(WorkerStarted)
        with pytest.raises(ConnectionError):
            client.deliver(REPORT, b"abc")
        client.deliver(REPORT, b"def")
        assert bytes(channel.next(MessageReceived).body) == b"def" and channel.events.empty()
        assert len(tap.connections) == 3
        channel.server.disconnect("w")
        wait_for(lambda: channel.dismissed == ["w"])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_reports_over_its_own_connection(channel: Channel) -> None:
    """What it would send over the control connection is dropped: it would be mixed with what the parent sends."""
    client = channel.client()
    client.deliver(REPORT, b"parent")
    child = os.fork()
    if child == 0:
        try:
            client.deliver(REPORT, b"child")
            client.control.report(Progress(step=9))
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    client.deliver(REPORT, b"parent again")
    assert [bytes(channel.next(MessageReceived).body) for _ in range(3)] == [b"parent", b"child", b"parent again"]
    client.control.report(Progress(step=4))
    assert channel.next(MessageReceived).message.progress == Progress(step=4)
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


def test_a_body_without_room_ends_its_connection_only(channel: Channel) -> None:
    with channel.greet("w") as worker, connect(channel.address, Open("w")) as bulk:
        bulk.stream(REPORT, [], 2**62)
        assert ended(bulk.socket)
        assert channel.next(WorkerStarted) and channel.server.send("w", StackRequest(1))
        assert worker.expect(StackRequest) == StackRequest(1)


# -- transfers of a state -----------------------------------------------------------------------------


@pytest.fixture
def transfer(channel: Channel) -> Iterator[Transfer]:
    with closing(Transfer(channel.server)) as transfer:
        yield transfer


def joined(channel: Channel, transfer: Transfer, worker: str, first: Message, size: int = 0) -> Connection:
    opened = connect(channel.address, Open(worker, transfer.name))
    opened.stream(first, [], size)
    return opened


def test_a_state_that_arrives_slowly_is_progress(channel: Channel, transfer: Transfer) -> None:
    with joined(channel, transfer, "a", GiveState(), 4) as giver:
        giver.socket.sendall(b"st")
        time.sleep(1.1)
        giver.socket.sendall(b"at")
        assert giver.expect(Received) == Received()
    assert bytes(transfer.data) == b"stat"
    assert channel.next(MessageReceived, moved=True) == MessageReceived("a", Moved())


def test_a_transfer_that_has_ended_ends_its_connections_at_once(channel: Channel, transfer: Transfer) -> None:
    transfer.close()
    with Tap(channel.address) as tap:
        for name in (transfer.name, "unknown"):
            with pytest.raises(ConnectionError):
                take(tap.address, "a", name)
            with pytest.raises(ConnectionError):
                Giving(tap.address, "a", name).send(b"state")
        assert len(tap.connections) == 4, "the worker does not try again"


def test_questions_are_answered_until_the_transfer_ends(channel: Channel, transfer: Transfer) -> None:
    transfer.answer = lambda question: question + 1
    with ThreadPoolExecutor() as pool:
        answers = [pool.submit(ask, channel.address, name, transfer.name, each) for each, name in enumerate("abc")]
        assert [each.result() for each in answers] == [1, 2, 3]
    transfer.close()
    with pytest.raises(ConnectionError):
        ask(channel.address, "a", transfer.name, 1)


@pytest.mark.parametrize("size", [0, 1, 9_000_000])
def test_a_state_arrives_whole(channel: Channel, transfer: Transfer, size: int) -> None:
    state = random.Random(size).randbytes(size)
    Giving(channel.address, "a", transfer.name).send(state, report={"size": 3})
    assert bytes(transfer.data) == state and transfer.report.result() == {"size": 3}
    with closing(Transfer(channel.server)) as filled, ThreadPoolExecutor() as pool:
        filled.fill(transfer.data)
        taken = [pool.submit(take, channel.address, name, filled.name) for name in "bc"]
        assert all(bytes(each.result()) == state for each in taken)


def test_a_part_of_a_state_is_none(channel: Channel, transfer: Transfer) -> None:
    """The worker that gives it dies."""
    with joined(channel, transfer, "a", GiveState(), 4) as giver:
        giver.socket.sendall(b"st")
        wait_for(lambda: transfer.moved == 1)
    assert isinstance(transfer.report.exception(timeout=WAIT_S), ConnectionError)
    assert transfer.data is None


def test_a_transfer_that_is_closed_ends(channel: Channel, transfer: Transfer) -> None:
    with joined(channel, transfer, "a", GiveState(), 4) as giver:
        giver.socket.sendall(b"st")
        wait_for(lambda: transfer.moved == 1)
        transfer.close()
        with pytest.raises(ConnectionError):
            giver.expect(Received)


def test_a_state_is_given_once(channel: Channel, transfer: Transfer) -> None:
    Giving(channel.address, "a", transfer.name).send(b"state")
    with pytest.raises(ConnectionError):
        Giving(channel.address, "b", transfer.name).send(b"other")
    assert bytes(transfer.data) == b"state"


@pytest.mark.parametrize("passed", [1, 2, 3])
@pytest.mark.parametrize(
    "wait",
    [
        lambda client, name: client.control.take(name),
        lambda client, name: client.control.giving(name).send(b"state"),
        lambda client, name: client.answer(1, Ok(Blob(bytes(SMALL)))),
    ],
    ids=["take", "give", "answer"],
)
def test_a_driver_that_is_stopped_does_not_hold_the_main_thread_up(
    channel: Channel, wait: Callable[[ControlClient, str], Any], passed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stops before its proof, before its next answer, or before the worker begins. Another driver needs that thread."""
    monkeypatch.setattr(orphan, "LEASE_S", 0.5)
    runs = threading.Event()

    def change(side: bytes, sent: list[bytes]) -> list[bytes]:
        if side == DRIVER and len(sent) > passed:
            runs.wait(60)
        return sent[-1:]

    with Tap(channel.address, change) as tap, closing(Transfer(channel.server)) as transfer:
        tap.change = lambda side, sent: sent[-1:]
        transfer.fill(b"state")
        client = channel.client(through=tap, orphan_s=60.0)
        client.holds_state = lambda: True
        channel.next(WorkerStarted)
        tap.change = change
        if passed == 3:
            wait_for(lambda: client.control.interrupted)
        began = time.monotonic()
        with pytest.raises(OSError):
            wait(client, transfer.name)
        assert client.control.interrupted and time.monotonic() - began < WAIT_S
        runs.set()
        channel.server.disconnect("w")
        wait_for(lambda: channel.dismissed == ["w"])


def test_the_main_thread_is_freed_again_by_the_end_of_a_driver_that_had_returned(
    channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was freed once when the driver had said nothing for too long, and had begun to wait for that driver again."""
    ahead_s, before = [0.0], threading.active_count()
    look = DriverContact.look
    monkeypatch.setattr(DriverContact, "look", lambda self, now, **state: look(self, now + ahead_s[0], **state))
    client = channel.client(orphan_s=600.0)
    client.holds_state = lambda: True
    ahead_s[0] = lease.LEASE_S + 1.0
    assert client.driver.calls.get(timeout=WAIT_S) is None
    channel.server.close(dismiss=False)
    assert client.driver.calls.get(timeout=WAIT_S) is None
    ahead_s[0] += 600.0  # it ends itself
    wait_for(lambda: threading.active_count() < before)


def test_a_worker_of_a_driver_that_is_stopped_gives_up_when_another_one_may_take_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(control_client, "LEASE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        address = ControlAddress("127.0.0.1", stopped.getsockname()[1], bytes(KEY_BYTES))
        began = time.monotonic()
        with pytest.raises(ConnectionError, match="timed out"):
            ControlClient(address, "w", "node", lambda: None, orphan_s=60.0)
        assert time.monotonic() - began < WAIT_S


def test_a_save_in_the_background_waits_for_a_driver_that_is_stopped(
    channel: Channel, transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = channel.client(orphan_s=60.0)
    client.holds_state = lambda: True
    giving = client.control.giving(transfer.name)
    monkeypatch.setattr(orphan, "LEASE_S", 0.5)
    wait_for(lambda: client.control.interrupted)
    with ThreadPoolExecutor() as pool:
        pool.submit(giving.send, report={"size": 3}).result()
    assert transfer.report.result(timeout=WAIT_S) == {"size": 3}
    channel.server.disconnect("w")
    wait_for(lambda: channel.dismissed == ["w"])


# -- admission ----------------------------------------------------------------------------------------


def test_a_proof_may_arrive_byte_by_byte(channel: Channel) -> None:
    with channel.open() as worker:
        worker.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        mine, key = new_number(), channel.address.key
        numbers = worker.recv(len(GREETING) + NUMBER_BYTES, socket.MSG_WAITALL)[len(GREETING) :] + mine
        for byte in mine + proof(key, WORKER, numbers) + framed(Hello("w", "n", 1)):
            worker.sendall(bytes([byte]))
        assert channel.next(WorkerStarted).worker == "w"


def test_a_second_control_connection_of_a_worker_is_refused(channel: Channel) -> None:
    with channel.greet("there"):
        channel.next(WorkerStarted)
        with pytest.raises(ConnectionAbortedError):
            connect(channel.address, Hello("there", "n", 1), patience_s=0.0)
        assert channel.server.send("there", ConfirmBoundary()), "the worker that was connected before is served"
    assert channel.next(WorkerEnded).worker == "there"


def test_a_connection_that_is_not_admitted_in_time_is_closed() -> None:
    channel = Channel(admission_s=0.3)
    with closing(channel.server):
        for sent in (b"", bytes(31), bytes(NUMBER_BYTES + PROOF_BYTES - 1)):
            with channel.open(sent) as late:
                assert ended(late)
        with channel.open() as slow, pytest.raises(OSError):
            for _ in range(100):
                slow.sendall(b"x")
                time.sleep(0.05)
        with channel.greet():
            channel.next(WorkerStarted)
            time.sleep(0.5)
            assert channel.server.send("w", ConfirmBoundary()), "an admitted worker may be silent"


def test_a_refused_worker_tries_again(channel: Channel) -> None:
    """When the driver is flooded with connections, it may close that of a worker before the worker is admitted."""
    tries: list[int] = []

    def change(side: bytes, passed: list[bytes]) -> list[bytes]:
        tries.append(1)
        if len(tries) == 1:
            time.sleep(2.2)  # longer than the patience, which begins when a connection was closed
            raise OSError
        return passed[-1:]

    with Tap(channel.address, change) as tap:
        connect(tap.address, Hello("w", "n", 1), patience_s=2.0).socket.close()
        assert channel.next(WorkerStarted).worker == "w" and len(tap.connections) == 2


def test_a_client_gives_up_on_another_kind_of_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=lambda: [listener.accept()[0].close() for _ in range(3)], daemon=True).start()
        with pytest.raises(ConnectionAbortedError, match="another process has that port"):
            connect(ControlAddress("127.0.0.1", listener.getsockname()[1], bytes(32)), Alive(), patience_s=1.2)


def test_refused_connections_are_warned_of_once_for_each_machine(
    channel: Channel, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(30):
        with channel.open(bytes(64)) as client:
            assert ended(client)
    assert len([each for each in caplog.records if "refused a connection" in each.getMessage()]) == 1


def test_a_closed_server_leaves_nothing(channel: Channel) -> None:
    before = threading.active_count()
    channel.client()
    channel.next(WorkerStarted)
    with connect(channel.address, Open("w")) as bulk:
        channel.server.close()
        assert ended(bulk.socket)
    wait_for(lambda: threading.active_count() < before)
    with pytest.raises(ConnectionRefusedError):
        channel.open()
    assert not channel.server.send("w", ConfirmBoundary())
    channel.server.close()


def test_a_server_can_be_closed_by_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that finds that the trainer is lost closes it, and the script's, which sees the workers go."""
    errors: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    for _ in range(20):
        channel = Channel()
        workers = [channel.greet(f"w{number}") for number in range(8)]
        for _ in workers:
            channel.next(WorkerStarted)

        def close(channel: Channel = channel) -> None:
            channel.next(WorkerEnded)
            channel.server.close(dismiss=False)

        other = threading.Thread(target=close)
        other.start()
        channel.server.close(dismiss=False)
        other.join()
        for worker in workers:
            worker.close()
    assert errors == []


@pytest.mark.parametrize(("expected", "closed"), [(0, True), (100, False)])
def test_all_expected_workers_can_connect_at_once(channel: Channel, expected: int, closed: bool) -> None:
    """None of these connections has proved the key yet."""
    channel.server.expected_workers = expected
    opened = [channel.open() for _ in range(UNADMITTED_AT_MOST + 12)]
    for each in opened[-1:]:
        assert len(each.recv(100)) == len(GREETING) + NUMBER_BYTES, "all were accepted"
    if closed:
        assert ended(opened[0])
    else:
        opened[0].recv(len(GREETING) + NUMBER_BYTES)
        opened[0].settimeout(0.5)
        with pytest.raises(TimeoutError):
            opened[0].recv(1)
    for each in opened:
        each.close()


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
        ControlClient(ControlAddress("127.0.0.1", port, bytes(KEY_BYTES)), "w", "node", lambda: None)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="this system has no TCP_USER_TIMEOUT")
def test_a_worker_notices_that_the_drivers_machine_is_cut_off(channel: Channel) -> None:
    """After as long as the driver waits for a worker's machine. The end of the connection ends the worker. tests/hosts cuts a
    real connection."""
    channel.server.unreachable_s = 7.0
    with channel.greet() as worker:
        assert worker.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 7000
        assert worker.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_a_slow_snapshot_is_progress_of_its_worker(channel: Channel) -> None:
    with connect(channel.address, Open("w")) as bulk:
        bulk.stream(SnapshotUpload(Progress(), 1), [], 10_000)
        wait_for(lambda: bulk.socket.send(b"x") and not channel.events.empty())  # the rest is on its way
        assert channel.next(MessageReceived, moved=True) == MessageReceived("w", Moved())
