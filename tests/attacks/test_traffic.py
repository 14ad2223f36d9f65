"""Someone without the key connects, reads the traffic, or changes it: nothing that they sent is unpickled or carried out.

A pickle runs whatever it names, so each of them sends one that notes that it was unpickled."""

from __future__ import annotations

import contextlib
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raysgd.core.authenticated_frames import (
    CODE_BYTES,
    DRIVER,
    HEAD_BYTES,
    KEY_BYTES,
    NUMBER_BYTES,
    PREFIX,
    PROOF_BYTES,
    WORKER,
    AlteredError,
    Session,
    new_number,
    proof,
)
from raysgd.core.connection import ControlAddress, connect
from raysgd.core.messages import (
    Alive,
    CallAnswer,
    FunctionReport,
    Hello,
    KillProcess,
    Open,
    PreemptionNotice,
    Received,
    SnapshotUpload,
    StackRequest,
    StartDealer,
)
from raysgd.core.outcomes import Ok
from raysgd.core.progress import Control, Progress
from raysgd.core.ranks import SingleWorkerBackend
from raysgd.core.snapshot import GUARDED, guarded_part
from raysgd.torch.checkpoint import packing
from raysgd.workers.control_client import ControlClient
from raysgd.workers.control_server import ControlServer
from raysgd.workers.events import Event, MessageReceived, PartReceived, WorkerEnded, WorkerStarted
from raysgd.workers.replica_host import ReplicaHost
from raysgd.workers.transfer import Giving, Transfer, take
from tests.traffic import Change, Events, Runs, Tap, units

EVIL = pickle.dumps(Runs())
EVIL_BODY = EVIL.ljust(200, b".")  # what follows a pickle's end is ignored
STATE = GUARDED.pack(100) + bytes(92) + b"t" * 1000
REPORT = FunctionReport("report", run=1, attempt=2, rank=3, metrics_size=3, has_checkpoint=False)


class Driver:
    """A control server and its events."""

    def __init__(self) -> None:
        self.events = Events()
        self.server = ControlServer(self.events, "127.0.0.1", admission_s=60.0)
        self.address = self.server.address_for_workers()

    def next(self) -> Event:
        while isinstance(event := self.events.get(timeout=60), PartReceived):
            continue
        return event

    def still_serves(self) -> None:
        """Check that no attacker has had an effect, and that a new worker is admitted."""
        with connect(self.address, Hello("late", "n", 1)):
            started = self.next()
            assert isinstance(started, WorkerStarted) and started.worker == "late"
        assert isinstance(self.next(), WorkerEnded) and self.events.empty()


@pytest.fixture
def driver() -> Iterator[Driver]:
    Runs.noted.clear()
    driver = Driver()
    with closing(driver.server):
        yield driver
    assert not Runs.noted, "what a stranger sent was unpickled"


def frame(content: bytes, code: bytes = bytes(CODE_BYTES), body: bytes = b"") -> bytes:
    return PREFIX.pack(len(content), len(body), 0) + code + content + body


def strange(key: bytes = bytes(KEY_BYTES), side: bytes = WORKER) -> Callable[[bytes], bytes]:
    """Return what a client does that speaks the protocol, but with another key, or as another side."""

    def answer(number: bytes) -> bytes:
        mine = new_number()
        session = Session(key, WORKER, number + mine)
        return mine + proof(key, side, number + mine) + session.framed(Runs())  # type: ignore[arg-type]

    return answer


@pytest.mark.parametrize(
    "answer",
    [
        lambda number: EVIL_BODY,
        lambda number: bytes(NUMBER_BYTES + PROOF_BYTES) + frame(EVIL),
        lambda number: number + number + frame(EVIL, number),
        lambda number: b"GET / HTTP/1.1\r\nHost: example\r\n\r\n" + EVIL,
        strange(),
    ],
)
def test_who_does_not_prove_the_key_is_not_read(driver: Driver, answer: Callable[[bytes], bytes]) -> None:
    with socket.create_connection((driver.address.host, driver.address.port), timeout=60) as client:
        number = client.recv(NUMBER_BYTES)
        client.sendall(answer(number))
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b"", "the driver proves its own key only to those who have"
    driver.still_serves()


def test_a_worker_proves_its_key_before_it_is_read(driver: Driver) -> None:
    """A proof for the driver's side, made with the right key, is none of a worker."""
    with socket.create_connection((driver.address.host, driver.address.port), timeout=60) as client:
        client.sendall(strange(driver.address.key, DRIVER)(client.recv(NUMBER_BYTES)))
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""
    driver.still_serves()


# -- someone takes the driver's place -----------------------------------------------------------------


OTHER_KEY = bytes(range(KEY_BYTES))


def impostor(answer: Callable[[bytes], bytes], number: bytes = bytes(NUMBER_BYTES), *, key: bytes = OTHER_KEY) -> None:
    """Let a worker with this key connect to a driver that sends this number, and then this answer to what the worker has sent."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            opened, _ = listener.accept()
            with opened:
                opened.sendall(number)
                sent = units(opened, WORKER)
                opened.sendall(answer(next(sent) + next(sent)))
                with contextlib.suppress(OSError, EOFError):
                    next(sent)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        address = ControlAddress("127.0.0.1", listener.getsockname()[1], key)
        with pytest.raises(ConnectionAbortedError):
            connect(address, Hello("w", "n", 1), patience_s=0.0)
        thread.join(60)
    assert not Runs.noted


def test_a_worker_believes_no_driver_without_the_key() -> None:
    impostor(lambda sent: bytes(PROOF_BYTES) + frame(EVIL))
    impostor(lambda sent: EVIL + bytes(PROOF_BYTES) + EVIL)


def test_a_challenge_that_is_sent_back_proves_nothing() -> None:
    """The worker's own number, proof and frame."""
    impostor(lambda sent: sent[NUMBER_BYTES:])
    impostor(lambda sent: sent[:PROOF_BYTES] + sent[NUMBER_BYTES + PROOF_BYTES :])


# -- someone has recorded the traffic -----------------------------------------------------------------


def recorded(driver: Driver, body: bytes = b"abc") -> tuple[list[bytes], list[bytes]]:
    """Return what a worker and the driver sent on a bulk connection, and check that it had an effect."""
    with Tap(driver.address) as tap:
        with connect(tap.address, Open("w")) as bulk:
            bulk.send(REPORT, body, guarded=len(body))
            bulk.expect(Received)
        event = driver.next()
        assert isinstance(event, MessageReceived) and (event.message, event.body) == (REPORT, body)
        passed = tap.connections[-1]  # on a busy machine, another one may have been tried before
        return list(passed.worker), list(passed.driver)


def test_a_recorded_session_of_a_worker_is_refused(driver: Driver) -> None:
    sent, _ = recorded(driver)
    with socket.create_connection((driver.address.host, driver.address.port), timeout=60) as client:
        client.recv(NUMBER_BYTES)
        client.sendall(b"".join(sent))
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""
    driver.still_serves()


def test_a_recorded_session_of_the_driver_is_refused(driver: Driver) -> None:
    _, sent = recorded(driver)
    impostor(lambda _: b"".join(sent[1:]), sent[0], key=driver.address.key)


# What is made of a report and its body, which were recorded.
REPLAYED: dict[str, Callable[[bytes, bytes], bytes]] = {
    "as they were": lambda report, body: report + body,
    "another body, with the code of theirs": lambda report, body: report + changed_body(body),
    "the body alone": lambda report, body: body,
}
# What is sent in a worker's place, from which of its units on. Then the worker's own connection has proved the key.
SNIFFED: dict[str, tuple[int, Callable[[bytes, bytes], list[bytes]]]] = {
    "report and body": (3, lambda report, body: [report, body]),
    "a body after the worker's own report": (4, lambda report, body: [body]),
    "a changed body after the worker's own report": (4, lambda report, body: [changed_body(body)]),
}


def changed_body(body: bytes) -> bytes:
    return pickle.dumps([Runs()]).ljust(len(body) - CODE_BYTES, b".") + body[-CODE_BYTES:]


def sniffed(driver: Driver) -> tuple[list[bytes], bytes, bytes]:
    """Return how a worker began a bulk connection, and a report in it whose body notes that it is unpickled."""
    (*began, report, body), _ = recorded(driver, EVIL_BODY)
    pickle.loads(EVIL_BODY)  # as the driver does with the body of a report
    assert Runs.noted, "a body that is sent again would run code on the driver"
    Runs.noted.clear()
    return began, report, body


def unpickles_all(driver: Driver) -> None:
    """Do with each body that has arrived what a driver does that trusts it."""
    while not driver.events.empty():
        event = driver.events.get()
        if isinstance(event, MessageReceived):
            pickle.loads(event.body)


@pytest.mark.parametrize("replay", REPLAYED)
def test_a_body_sent_with_sniffed_bytes_is_refused(driver: Driver, replay: str) -> None:
    began, report, body = sniffed(driver)
    with socket.create_connection((driver.address.host, driver.address.port), timeout=60) as client:
        client.recv(NUMBER_BYTES)
        client.sendall(b"".join(began) + REPLAYED[replay](report, body))
        with contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""
    unpickles_all(driver)
    driver.still_serves()


@pytest.mark.parametrize("sniff", SNIFFED)
def test_a_body_sent_with_sniffed_bytes_is_refused_on_a_workers_new_connection(driver: Driver, sniff: str) -> None:
    _, report, body = sniffed(driver)
    place, make = SNIFFED[sniff]
    with (
        Tap(driver.address, at(place, WORKER, lambda sent: make(report, body))) as tap,
        connect(tap.address, Open("w")) as bulk,
        pytest.raises(ConnectionError),
    ):
        bulk.send(REPORT, EVIL_BODY, guarded=len(EVIL_BODY))
        bulk.expect(Received)
    unpickles_all(driver)
    driver.still_serves()


def test_the_traffic_has_no_key(driver: Driver) -> None:
    traffic = b"".join(each for side in recorded(driver) for each in side)
    assert driver.address.key not in traffic and driver.address.key.hex().encode() not in traffic


# -- someone changes the traffic ----------------------------------------------------------------------

FIRST = 3  # a worker's proof and Hello, or a driver's number and proof, and then the first message


def at(place: int, side: bytes, change: Callable[[list[bytes]], list[bytes]]) -> Change:
    """Change what this side sends at this place, and pass everything else on."""
    return lambda sender, sent: change(sent) if sender == side and len(sent) == place else sent[-1:]


def flipped(unit: bytes, place: int) -> bytes:
    changed = bytearray(unit)
    changed[place] ^= 1
    return bytes(changed)


def forged(sent: list[bytes]) -> list[bytes]:
    """A pickle in the message's place, with the message's code."""
    content = sent[-1][HEAD_BYTES:]
    return [sent[-1][:HEAD_BYTES] + EVIL.ljust(len(content), b".")]


# tests/contracts/test_codes.py has all kinds of changes, without sockets.
CHANGES: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "altered": lambda sent: [flipped(sent[-1], -1)],
    "its sizes altered": lambda sent: [flipped(sent[-1], 11), bytes(1 << 10)],
    "another pickle in its place": forged,
    "repeated": lambda sent: [sent[-1], sent[-1]],
    "a message added": lambda sent: [frame(EVIL), sent[-1]],
}


@pytest.mark.parametrize(("side", "place"), [(WORKER, 1), (DRIVER, 1), (DRIVER, 2)], ids=["worker", "number", "driver"])
def test_a_changed_challenge_or_proof_is_refused(driver: Driver, side: bytes, place: int) -> None:
    with (
        Tap(driver.address, at(place, side, lambda sent: [flipped(sent[-1], -1)])) as tap,
        pytest.raises(ConnectionAbortedError),
    ):
        connect(tap.address, Open("w"), patience_s=0.0)
    driver.still_serves()


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_message_of_a_worker_ends_its_connection(driver: Driver, change: str) -> None:
    with (
        Tap(driver.address, at(FIRST, WORKER, CHANGES[change])) as tap,
        connect(tap.address, Hello("w", "n", 1)) as worker,
    ):
        assert isinstance(driver.next(), WorkerStarted)
        worker.send(CallAnswer(7, bytes(100)))
        worker.send(PreemptionNotice())
        event = driver.next()
        if change == "repeated":  # the first one is genuine
            assert isinstance(event, MessageReceived)
            event = driver.next()
        assert isinstance(event, WorkerEnded) and event.reason == "network"
    driver.still_serves()


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_message_of_the_driver_is_an_error(driver: Driver, change: str) -> None:
    with Tap(driver.address, at(FIRST, DRIVER, CHANGES[change])) as tap:
        with connect(tap.address, Hello("w", "n", 1)) as worker:
            assert isinstance(driver.next(), WorkerStarted)
            driver.server.send("w", KillProcess(1))
            driver.server.send("w", StackRequest(2))
            with pytest.raises(AlteredError):
                if change == "repeated":
                    assert worker.expect(KillProcess) == KillProcess(1)
                worker.receive()
        assert isinstance(driver.next(), WorkerEnded)
    driver.still_serves()


# -- bodies -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def worker_behind(driver: Driver, change: Change) -> Iterator[ControlClient]:
    """Yield a worker's client, and dismiss it: one that loses its driver would end this process."""
    gone = threading.Event()
    with Tap(driver.address, change) as tap:
        client = ControlClient(tap.address, "w", "n", lambda: None, gone.set)
        assert isinstance(driver.next(), WorkerStarted)
        try:
            yield client
        finally:
            driver.server.disconnect("w")
            gone.wait(60)


@pytest.mark.parametrize("place", [0, -CODE_BYTES - 1, -1], ids=["first", "last", "code"])
@pytest.mark.parametrize("message", [REPORT, StartDealer("d")])
def test_a_body_that_would_be_unpickled_is_dropped_if_it_was_changed(driver: Driver, message: Any, place: int) -> None:
    def change(side: bytes, sent: list[bytes]) -> list[bytes]:
        return [flipped(sent[-1], place) if len(sent[-1]) > 1 << 20 else sent[-1]]

    with worker_behind(driver, change) as client, pytest.raises(ConnectionError):
        client.deliver(message, EVIL.ljust(2 << 20, b"."))
    driver.still_serves()


def test_a_snapshot_whose_pickle_was_changed_is_dropped(driver: Driver) -> None:
    def change(side: bytes, sent: list[bytes]) -> list[bytes]:
        return [flipped(sent[-1], 50) if len(sent[-1]) == 100 + CODE_BYTES else sent[-1]]

    with worker_behind(driver, change) as client, pytest.raises(ConnectionError):
        client.upload(SnapshotUpload(Progress(), 1), STATE[:10], STATE[10:])
    driver.still_serves()


def test_the_pickle_of_a_state_is_what_is_guarded() -> None:
    """Nothing behind it is unpickled, whatever it is."""
    parts = packing.pack({"a": torch.ones(1000), "text": "x" * 1000, "b": torch.ones(3)}, copy=True)
    guarded, whole = guarded_part(*parts), b"".join(parts)
    assert guarded == guarded_part(whole) and whole.index(b"x" * 1000) + 1000 < guarded
    changed = packing.unpack(whole[:guarded] + EVIL.ljust(len(whole) - guarded, b"."))
    assert changed["text"] == "x" * 1000 and changed["a"].shape == (1000,)


def test_a_worker_gives_its_state_with_a_code() -> None:
    given: list[int] = []
    control = Control()
    control.giving = lambda name: SimpleNamespace(send=lambda state, guarded: given.append(guarded))
    host = ReplicaHost(SingleWorkerBackend(), control, remote=False)
    host.perform(
        "build", {"factory": lambda *_: SimpleNamespace(state=lambda: STATE, progress=Progress()), "rank_info": None}
    )
    assert isinstance(host.perform("state", {"transfer": "t"}), Ok) and given == [100]


def test_a_state_whose_pickle_was_changed_is_not_passed_on(driver: Driver) -> None:
    """From the worker that gives it to the driver, and from there to those that take it."""
    change = at(4, WORKER, lambda sent: [flipped(sent[-1], 50)])
    with ThreadPoolExecutor() as pool, Tap(driver.address, change) as tap, closing(Transfer(driver.server)) as transfer:
        taken = pool.submit(take, driver.address, "b", transfer.name)
        with pytest.raises(ConnectionError):
            Giving(tap.address, "a", transfer.name).send(STATE, guarded=100)
        with pytest.raises(ConnectionError):
            taken.result(60)
    driver.still_serves()


def test_a_state_whose_pickle_was_changed_on_its_way_to_a_worker_is_not_loaded(driver: Driver) -> None:
    change = at(4, DRIVER, lambda sent: [flipped(sent[-1], 50)])
    with Tap(driver.address, change) as tap, closing(Transfer(driver.server)) as transfer:
        transfer.fill(STATE)
        assert take(driver.address, "b", transfer.name) == STATE
        with pytest.raises(AlteredError):
            take(tap.address, "b", transfer.name)
    driver.still_serves()


def test_a_message_that_is_cut_is_no_message(driver: Driver) -> None:
    with (
        Tap(driver.address, at(4, WORKER, lambda sent: [sent[-1][:-1]])) as tap,
        connect(tap.address, Open("w")) as bulk,
    ):
        bulk.send(REPORT, b"abc", guarded=3)
        tap.cut()
        with pytest.raises(OSError):
            bulk.send(Alive())
            bulk.expect(Received)
    driver.still_serves()
