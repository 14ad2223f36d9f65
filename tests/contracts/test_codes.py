"""The codes of the control channel, without sockets: what the other end accepts, and what it does not even unpickle."""

import pickle
from collections.abc import Callable, Iterator

import pytest

from raysgd.core.authenticated_frames import (
    CODE_BYTES,
    DRIVER,
    HEAD_BYTES,
    KEY_BYTES,
    PREFIX,
    WORKER,
    AlteredError,
    Session,
    new_number,
    proof,
    proves,
)
from raysgd.core.messages import Alive, CallAnswer, FunctionReport, KillProcess, Message, ProgressReport, StackReport
from raysgd.core.metrics import Measured
from raysgd.core.outcomes import CollectivePlace
from raysgd.core.progress import Progress
from raysgd.core.snapshot import GUARDED, guarded_part
from tests.traffic import Runs

KEY = bytes(range(KEY_BYTES))


@pytest.fixture(autouse=True)
def nothing_ran() -> Iterator[None]:
    Runs.noted.clear()
    yield
    assert not Runs.noted


def test_the_pickle_of_these_tests_runs_code() -> None:
    pickle.loads(pickle.dumps(Runs()))
    assert Runs.noted
    Runs.noted.clear()


def pair(key: bytes = KEY) -> tuple[Session, Session]:
    """Return both ends of a new connection."""
    numbers = new_number() + new_number()
    return Session(key, WORKER, numbers), Session(key, DRIVER, numbers)


def arrives(end: Session, frame: bytes) -> Message:
    (message,) = end.taken(bytearray(frame))
    return message


# -- the proof ----------------------------------------------------------------------------------------


def test_a_proof_is_valid_for_its_key_its_side_and_its_numbers_only() -> None:
    driver, worker = new_number(), new_number()
    shown = proof(KEY, WORKER, driver + worker)
    assert proves(shown, KEY, WORKER, driver + worker)
    assert not proves(shown, bytes(KEY_BYTES), WORKER, driver + worker), "another key"
    assert not proves(shown, KEY, DRIVER, driver + worker), "sent back by the other end"
    assert not proves(shown, KEY, WORKER, new_number() + worker), "recorded on another connection"
    assert not proves(shown, KEY, WORKER, worker + driver), "the numbers exchanged"
    assert not proves(shown[:-1], KEY, WORKER, driver + worker)
    assert not proves(proof(KEY, b"session", driver + worker), KEY, WORKER, driver + worker)


# -- frames -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        ProgressReport(
            1, Progress(step=3, phase="train", finished=True), Measured({"loss": 0.5, "note": "ä", "n": 2, "ok": True})
        ),
        StackReport(
            1, ("a.py:1 f",), "train", 3, CollectivePlace(4, "forward", "a.py:1 f", ((1, 2),), ((2, "a.py:1 f"),))
        ),
        FunctionReport("report", run=1, attempt=2, rank=3, metrics_size=3, has_checkpoint=False),
        CallAnswer(3, pickle.dumps(Runs())),
        Alive(),
    ],
)
def test_a_message_arrives_as_it_was_sent(message: Message) -> None:
    worker, driver = pair()
    assert arrives(driver, worker.framed(message)) == message
    assert arrives(worker, driver.framed(message)) == message


def test_messages_that_arrive_together_or_in_pieces() -> None:
    worker, driver = pair()
    sent = b"".join(worker.framed(KillProcess(n)) for n in range(3))
    received, messages = bytearray(), []
    for byte in sent:
        received.append(byte)
        messages += driver.taken(received)
    assert messages == [KillProcess(n) for n in range(3)] and not received
    received += worker.framed(KillProcess(3)) + worker.framed(KillProcess(4))
    assert list(driver.taken(received)) == [KillProcess(3), KillProcess(4)]


def test_a_frame_with_one_changed_byte_is_not_unpickled() -> None:
    numbers = new_number() + new_number()
    frame = Session(KEY, WORKER, numbers).framed(Runs())
    for place in range(len(frame)):
        changed = bytearray(frame)
        changed[place] ^= 0x40
        driver, received = Session(KEY, DRIVER, numbers), bytearray(changed)
        if place < 4 and PREFIX.unpack_from(changed)[0] < 1 << 20:
            received += bytes(1 << 20)  # it says that it is longer, and waits for that
        with pytest.raises(AlteredError):
            list(driver.taken(received))


Change = Callable[[list[bytes]], list[bytes]]
CHANGES: dict[str, Change] = {
    "dropped": lambda frames: frames[1:],
    "one in the middle dropped": lambda frames: [frames[0], frames[2]],
    "repeated": lambda frames: [frames[0], *frames],
    "reordered": lambda frames: [frames[1], frames[0], frames[2]],
    "one's code for another": lambda frames: [
        frames[0][: PREFIX.size] + frames[1][PREFIX.size : HEAD_BYTES] + frames[0][HEAD_BYTES:],
        *frames[1:],
    ],
}


@pytest.mark.parametrize("change", CHANGES)
def test_frames_are_accepted_once_and_in_their_order(change: str) -> None:
    worker, driver = pair()
    frames = [worker.framed(KillProcess(n)) for n in range(3)]
    accepted = []
    with pytest.raises(AlteredError):
        for frame in CHANGES[change](frames):
            accepted.append(arrives(driver, frame))
    assert accepted == [KillProcess(n) for n in range(len(accepted))], "a beginning of what was sent"


def test_frames_of_other_connections_and_of_the_own_end_are_not_unpickled() -> None:
    numbers = new_number() + new_number()
    (other, _), (stranger, _) = pair(), (Session(bytes(KEY_BYTES), WORKER, numbers), None)
    for sender in (other, stranger, Session(KEY, DRIVER, numbers)):
        with pytest.raises(AlteredError):
            arrives(Session(KEY, DRIVER, numbers), sender.framed(Runs()))


def test_a_message_that_is_too_long_is_neither_sent_nor_waited_for() -> None:
    worker, driver = pair()
    with pytest.raises(ValueError, match="too long"):
        worker.framed(CallAnswer(1, bytes(2 << 20)))
    with pytest.raises(AlteredError, match="not a raysgd control message"):
        arrives(driver, PREFIX.pack(2**31, 0, 0) + bytes(CODE_BYTES))


# -- states -------------------------------------------------------------------------------------------


def test_a_state_says_how_much_of_it_is_unpickled() -> None:
    assert guarded_part(GUARDED.pack(20), bytes(12), bytes(1000)) == 20
    assert guarded_part(GUARDED.pack(2000) + bytes(12)) == 20, "never more than there is"
    assert guarded_part(b"short") == 5, "all of it"
    assert guarded_part() == guarded_part(b"") == 0
