"""Someone without the key connects, or takes the driver's place: nothing that they sent is unpickled, and they hold nobody up.

A pickle runs whatever it names, so each of them sends one that notes that it was unpickled."""

from __future__ import annotations

import contextlib
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from raysgd.core.channel.connection import ControlAddress, connect
from raysgd.core.channel.frames import (
    DRIVER,
    GREETING,
    KEY_BYTES,
    NUMBER_BYTES,
    PROOF_BYTES,
    SIZES,
    WORKER,
    new_number,
    proof,
)
from raysgd.core.channel.messages import FunctionReport, Hello, Moved, Open, Received, StackRequest
from raysgd.core.channel.network import allow_connections
from raysgd.errors import ConfigError
from raysgd.workers.control_server import ControlServer
from raysgd.workers.events import Event, MessageReceived, WorkerEnded, WorkerStarted
from tests.traffic import Events, Runs, Tap, units

EVIL = pickle.dumps(Runs())
FRAME = SIZES.pack(len(EVIL), 0) + EVIL
ENDLESS = SIZES.pack(2**63, 2**63) + EVIL
REPORT = FunctionReport("report", run=1, attempt=2, rank=3, metrics_size=3, has_checkpoint=False)
OTHER_KEY = bytes(range(KEY_BYTES))


class Driver:
    """A control server and its events."""

    def __init__(self) -> None:
        self.events = Events()
        self.server = ControlServer(self.events, "127.0.0.1", admission_s=600.0)
        self.address = self.server.address_for_workers()

    def next(self) -> Event:
        while isinstance(getattr(event := self.events.get(timeout=60), "message", None), Moved):
            continue
        return event

    def open(self) -> tuple[socket.socket, bytes]:
        """Return a connection on which nothing is proved yet, and the driver's number."""
        opened = socket.create_connection((self.address.host, self.address.port), timeout=60)
        sent = opened.recv(len(GREETING) + NUMBER_BYTES, socket.MSG_WAITALL)
        return opened, sent[len(GREETING) :]

    def still_serves(self) -> None:
        """Check that no attacker has had an effect, and that a new worker is served."""
        with connect(self.address, Hello("late", "n", 1), patience_s=60.0) as worker:
            started = self.next()
            assert isinstance(started, WorkerStarted) and started.worker == "late"
            assert self.server.send("late", StackRequest(1)) and worker.expect(StackRequest) == StackRequest(1)
        assert isinstance(self.next(), WorkerEnded) and self.events.empty()


@pytest.fixture
def driver() -> Iterator[Driver]:
    Runs.noted.clear()
    driver = Driver()
    with closing(driver.server):
        yield driver
    assert not Runs.noted, "what a stranger sent was unpickled"


def refused(client: socket.socket) -> bool:
    """Wait until the driver closes the connection. Return whether it has said nothing more."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def strange(key: bytes = OTHER_KEY, side: bytes = WORKER) -> Callable[[bytes], bytes]:
    """Return what a client does that speaks the protocol, but with another key, or as another side."""

    def answer(number: bytes) -> bytes:
        mine = new_number()
        return mine + proof(key, side, number + mine) + FRAME

    return answer


def test_the_pickle_of_these_tests_runs_code() -> None:
    pickle.loads(EVIL)
    assert Runs.noted
    Runs.noted.clear()


@pytest.mark.parametrize(
    "answer",
    [
        lambda number: EVIL.ljust(200, b"."),
        lambda number: bytes(NUMBER_BYTES + PROOF_BYTES) + FRAME,
        lambda number: bytes(NUMBER_BYTES + PROOF_BYTES) + ENDLESS,
        lambda number: ENDLESS.ljust(NUMBER_BYTES + PROOF_BYTES, b"."),
        lambda number: number + number + FRAME,
        lambda number: b"GET / HTTP/1.1\r\nHost: example\r\nConnection: close\r\n\r\n" + EVIL,
        strange(),
        strange(side=DRIVER),
    ],
    ids=["pickle", "no proof", "endless", "only sizes", "challenge sent back", "http", "wrong key", "wrong side"],
)
def test_who_does_not_prove_the_key_is_not_read(driver: Driver, answer: Callable[[bytes], bytes]) -> None:
    client, number = driver.open()
    with client:
        client.sendall(answer(number))
        assert refused(client), "the driver proves its own key only to those who have"
    driver.still_serves()


def test_the_drivers_side_of_a_proof_is_none_of_a_worker(driver: Driver) -> None:
    """Also if it was made with the right key."""
    client, number = driver.open()
    with client:
        client.sendall(strange(driver.address.key, DRIVER)(number))
        assert refused(client)
    driver.still_serves()


@pytest.mark.parametrize("sent", [0, 1, NUMBER_BYTES, NUMBER_BYTES + PROOF_BYTES - 1])
def test_a_thousand_who_do_not_answer_hold_nobody_up(driver: Driver, sent: int) -> None:
    """They stay silent, or after a part of an answer. Their time is not up yet."""
    allow_connections(1000, each=2)
    before = threading.active_count()
    with ExitStack() as opened:
        oldest = opened.enter_context(driver.open()[0])
        for _ in range(1000):
            client = opened.enter_context(socket.create_connection((driver.address.host, driver.address.port), 60))
            with contextlib.suppress(ConnectionError):  # it was closed for a newer one
                client.sendall(bytes(sent))
        assert refused(oldest), "nearly all were closed"
        driver.still_serves()
        assert threading.active_count() == before, "none has a thread"


# -- someone takes the driver's place -----------------------------------------------------------------


def impostor(
    answer: Callable[[bytes], bytes],
    number: bytes = bytes(NUMBER_BYTES),
    *,
    greeting: bytes = GREETING,
    key: bytes = OTHER_KEY,
    error: type[Exception] = ConnectionAbortedError,
    match: str | None = None,
) -> None:
    """Let a worker with this key connect to a driver that sends this greeting and number, and then this answer to what the
    worker has sent. The worker raises this error."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            opened, _ = listener.accept()
            with opened, contextlib.suppress(OSError, EOFError):
                opened.sendall(greeting + number)
                sent = units(opened, WORKER)
                opened.sendall(answer(next(sent) + next(sent)))
                next(sent)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        address = ControlAddress("127.0.0.1", listener.getsockname()[1], key)
        with pytest.raises(error, match=match):
            connect(address, Hello("w", "n", 1), patience_s=0.0)
        thread.join(60)
    assert not Runs.noted


def test_a_worker_believes_no_driver_without_the_key() -> None:
    impostor(lambda sent: bytes(PROOF_BYTES) + FRAME)
    impostor(lambda sent: bytes(PROOF_BYTES) + ENDLESS)
    impostor(lambda sent: EVIL + bytes(PROOF_BYTES) + EVIL)
    impostor(lambda sent: proof(OTHER_KEY[::-1], DRIVER, bytes(NUMBER_BYTES) + sent[:NUMBER_BYTES]))


def test_a_challenge_that_is_sent_back_proves_nothing() -> None:
    """The worker's own number, proof and frame."""
    impostor(lambda sent: sent[NUMBER_BYTES:])
    impostor(lambda sent: sent[:PROOF_BYTES] + sent[NUMBER_BYTES + PROOF_BYTES :])


def test_another_version_of_raysgd_is_named() -> None:
    versions = f"the script has raysgd 9.1, and this machine has {GREETING.split()[1].decode()}"
    impostor(lambda sent: b"", greeting=b"raysgd 9.1".ljust(len(GREETING)), error=ConfigError, match=versions)


def test_another_program_is_no_driver() -> None:
    impostor(lambda sent: FRAME, greeting=b"HTTP/1.1 400 Bad Request\r\n".ljust(len(GREETING)))


# -- someone has recorded the traffic -----------------------------------------------------------------


def recorded(driver: Driver) -> tuple[list[bytes], list[bytes]]:
    """Return what a worker and the driver sent on a bulk connection, and check that it had an effect."""
    with Tap(driver.address) as tap:
        with connect(tap.address, Open("w")) as bulk:
            bulk.send(REPORT, b"abc")
            bulk.expect(Received)
        event = driver.next()
        assert isinstance(event, MessageReceived) and (event.message, event.body) == (REPORT, b"abc")
        passed = tap.connections[-1]  # on a busy machine, another one may have been tried before
        return list(passed.worker), list(passed.driver)


def test_a_recorded_session_of_a_worker_is_refused(driver: Driver) -> None:
    sent, _ = recorded(driver)
    client, _ = driver.open()
    with client:
        client.sendall(b"".join(sent))
        assert refused(client)
    driver.still_serves()


def test_a_recorded_session_of_the_driver_is_refused(driver: Driver) -> None:
    _, sent = recorded(driver)
    number = sent[0].removeprefix(GREETING)
    impostor(lambda _: b"".join(sent[1:]), number, key=driver.address.key)


def test_the_traffic_and_the_log_have_no_key(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    traffic = b"".join(each for side in recorded(driver) for each in side)
    client, number = driver.open()
    with client:
        client.sendall(strange()(number))
        assert refused(client)
    driver.still_serves()  # the refusal was logged before
    key = driver.address.key
    said = caplog.text + repr(driver.address)
    assert key not in traffic and key.hex().encode() not in traffic
    assert key.hex() not in said and repr(key) not in said


@pytest.mark.parametrize(("side", "place"), [(WORKER, 1), (DRIVER, 1), (DRIVER, 2)], ids=["worker", "number", "driver"])
def test_a_changed_challenge_or_proof_is_refused(driver: Driver, side: bytes, place: int) -> None:
    def change(sender: bytes, sent: list[bytes]) -> list[bytes]:
        newest = bytearray(sent[-1])
        newest[-1] ^= sender == side and len(sent) == place
        return [bytes(newest)]

    with Tap(driver.address, change) as tap, pytest.raises(ConnectionAbortedError):
        connect(tap.address, Open("w"), patience_s=0.0)
    driver.still_serves()
