"""Checkpoints are written to a shared file system, or sent to the driver: completely, or not at all."""

import contextlib
import errno
import os
import queue
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd import CheckpointError
from raysgd.core.messages import CheckpointDraft, Message
from raysgd.storage import durable
from raysgd.torch.checkpoint import receiver as receiving
from raysgd.torch.checkpoint.receiver import Receiver
from raysgd.torch.checkpoint.streaming import LocalSink, StreamSink
from raysgd.workers import control_server
from raysgd.workers.control_server import ControlServer

CONTENT = {"x": torch.arange(3_000_000, dtype=torch.float32), "name": "here"}
OLD = b"the old one"


def over_the_wire(sink: StreamSink) -> StreamSink:
    return replace(sink, shared=False)


WAYS: dict[str, Callable[[StreamSink], StreamSink]] = {"file": lambda sink: sink, "wire": over_the_wire}


@pytest.fixture(params=list(WAYS))
def way(request: pytest.FixtureRequest) -> Callable[[StreamSink], StreamSink]:
    return WAYS[request.param]


@pytest.fixture
def server() -> Iterator[ControlServer]:
    server = ControlServer(queue.Queue(), "127.0.0.1")
    yield server
    server.close()


@pytest.fixture
def receiver(tmp_path: Path, server: ControlServer) -> Iterator[Receiver]:
    """Return a receiver for the file x.pt, which exists already."""
    (tmp_path / "x.pt").write_bytes(OLD)
    receiver = Receiver(tmp_path / "x.pt", server, stall_s=20)
    yield receiver
    receiver.close(CheckpointError("the test has ended"))


def write(file: Any) -> None:
    torch.save(CONTENT, file)


def fails(file: Any) -> None:
    file.write(b"half of it")
    raise TypeError("cannot pickle this")


def assert_new(folder: Path) -> None:
    read = torch.load(folder / "x.pt")
    assert torch.equal(read["x"], CONTENT["x"]) and read["name"] == "here"
    assert os.listdir(folder) == ["x.pt"]


def assert_old(folder: Path) -> None:
    assert (folder / "x.pt").read_bytes() == OLD
    assert os.listdir(folder) == ["x.pt"]


def drafts(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.endswith(".tmp")]


def test_the_received_bytes_equal_the_sent_ones(way: Any, tmp_path: Path, server: ControlServer) -> None:
    receiver = Receiver(tmp_path / "deep" / "x.pt", server)
    way(receiver.sink).send(write)
    assert receiver.done.result(20) == str(tmp_path / "deep" / "x.pt")
    assert_new(tmp_path / "deep")


def test_a_shared_file_system_is_used(receiver: Receiver, tmp_path: Path) -> None:
    stream = receiver.sink.connect()
    assert stream._file is not None
    assert over_the_wire(receiver.sink).connect()._file is None


def test_a_file_of_the_same_name_on_another_machine_is_recognized(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path.parent / "elsewhere"
    elsewhere.write_bytes(b"a file of another machine")
    monkeypatch.setattr(receiving, "CheckpointDraft", lambda mark, path: CheckpointDraft(mark, str(elsewhere)))
    assert receiver.sink.connect()._file is None
    assert elsewhere.read_bytes() == b"a file of another machine"


def test_an_error_during_the_transfer_is_reported_and_leaves_no_file(
    way: Any, receiver: Receiver, tmp_path: Path
) -> None:
    with pytest.raises(TypeError):
        way(receiver.sink).send(fails)
    with pytest.raises(CheckpointError, match="TypeError: cannot pickle this"):
        receiver.done.result(20)
    assert_old(tmp_path)


# -- workers that fail --------------------------------------------------------------------------------


def test_another_worker_can_replace_a_failed_one(way: Any, receiver: Receiver, tmp_path: Path) -> None:
    broken = way(receiver.sink).connect()
    with contextlib.suppress(CheckpointError):
        broken.send(lambda file: (file.write(b"half of it"), file.flush(), broken._connection.close()))
    way(receiver.sink).send(write)
    receiver.done.result(20)
    assert_new(tmp_path)


def test_no_worker_can_connect_after_the_call(way: Any, receiver: Receiver, tmp_path: Path) -> None:
    stream = way(receiver.sink).connect()
    receiver.call_ended()
    stream._connection.close()
    with pytest.raises(CheckpointError, match="checkpoint failed"):
        receiver.done.result(20)
    assert_old(tmp_path)


@pytest.mark.parametrize("first", WAYS)
@pytest.mark.parametrize("second", WAYS)
@pytest.mark.parametrize("goes", ["before", "while", "after", "never"])
def test_two_workers_never_mix_their_bytes(
    first: str, second: str, goes: str, receiver: Receiver, tmp_path: Path
) -> None:
    """Rank 0 fails, or seems to, and another worker replaces it: whenever the first one ends, the file is complete."""
    lost = WAYS[first](receiver.sink).connect()
    follower = WAYS[second](receiver.sink).connect()

    def leave(when: str) -> None:
        if goes == when:
            lost._connection.close()

    def write_slowly(file: Any) -> None:
        leave("before")
        torch.save(CONTENT, file)
        file.flush()
        leave("while")
        time.sleep(0.2)

    follower.send(write_slowly)
    leave("after")
    receiver.done.result(20)
    assert_new(tmp_path)
    if goes == "never":  # it has not failed, and continues to write
        with contextlib.suppress(CheckpointError):
            lost.send(lambda file: file.write(b"bytes of the first" * 100_000))
        assert_new(tmp_path)


# -- files equal what was written ---------------------------------------------------------------------


def flip_a_bit(draft: Path) -> None:
    """Change the end of the draft. (Every `load` verifies the checksums of what is before that.)"""
    with open(draft, "r+b") as file:
        file.seek(-1000, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "longer": lambda draft: os.truncate(draft, 20_000_000),
    "shorter": lambda draft: os.truncate(draft, 5_000_000),
    "emptied": lambda draft: os.truncate(draft, 0),
    "changed": flip_a_bit,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_draft_that_something_else_has_changed_does_not_replace_the_old_file(
    damage: str, receiver: Receiver, tmp_path: Path
) -> None:
    def write_and_damage(file: Any) -> None:
        write(file)
        file.flush()
        DAMAGES[damage](drafts(tmp_path)[0])

    receiver.sink.send(write_and_damage)
    with pytest.raises(CheckpointError, match="is not what the worker wrote"):
        receiver.done.result(20)
    assert_old(tmp_path)


# -- a full disk --------------------------------------------------------------------------------------


def full(*_: Any, **__: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_reported_as_such(
    way: Any, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = way(receiver.sink)
    stream = sink.connect()
    monkeypatch.setattr(durable.DurableFile, "write", full)
    with pytest.raises((OSError, CheckpointError)) as caught:
        stream.send(write)
    with pytest.raises((OSError, CheckpointError)) as told:
        receiver.done.result(20)
    said = caught.value if stream._file is not None else told.value  # the one that writes the file has the error
    assert isinstance(said, OSError) and said.errno == errno.ENOSPC
    assert "No space left on device" in str(told.value)
    assert_old(tmp_path)


def test_an_error_in_the_drivers_thread_ends_the_save(
    way: Any, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("in the driver's thread")

    stream = way(receiver.sink).connect()
    monkeypatch.setattr(receiving.Writer, "_compare", broken)
    with contextlib.suppress(CheckpointError):
        stream.send(write)
    with pytest.raises(ZeroDivisionError):
        receiver.done.result(20)
    assert_old(tmp_path)


# -- limits -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [b"", b"half of it" * 1_000_000])
def test_a_worker_that_sends_nothing_is_dropped(way: Any, half: bytes, tmp_path: Path, server: ControlServer) -> None:
    (tmp_path / "x.pt").write_bytes(OLD)
    receiver = Receiver(tmp_path / "x.pt", server, stall_s=0.5)
    stream = way(receiver.sink).connect()
    receiver.call_ended()

    def stand_still(file: Any) -> None:
        file.write(half)
        file.flush()
        with pytest.raises(CheckpointError, match=r"it has made no progress for 0\.5 s"):
            receiver.done.result(20)

    # The system's buffers may still accept what it sends next.
    with contextlib.suppress(CheckpointError):
        stream.send(stand_still)
    receiver.close(CheckpointError("it has ended already"))
    assert_old(tmp_path)


def test_a_disk_that_does_not_respond_ends_the_save(
    tmp_path: Path, server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.pt").write_bytes(OLD)
    receiver = Receiver(tmp_path / "x.pt", server, stall_s=0.5)
    monkeypatch.setattr(receiving, "CLOSE_S", 0.2)
    stuck = receiving.threading.Event()
    monkeypatch.setattr(durable.DurableFile, "sync", lambda file: stuck.wait(20))
    stream = over_the_wire(receiver.sink).connect()
    stream.send(write)
    receiver.call_ended()
    with pytest.raises(CheckpointError, match=r"it has made no progress for 0\.5 s"):
        receiver.done.result(20)
    receiver.close(CheckpointError("it has ended already"))
    assert_old(tmp_path)
    stuck.set()
    time.sleep(0.2)
    assert_old(tmp_path)


def test_a_receiver_without_a_worker_ends(tmp_path: Path, server: ControlServer) -> None:
    receiver = Receiver(tmp_path / "x.pt", server)
    receiver.close(CheckpointError("the call has failed"))
    with pytest.raises(CheckpointError, match="the call has failed"):
        receiver.done.result(0)
    assert os.listdir(tmp_path) == []
    with pytest.raises(CheckpointError, match="has ended this save"):
        receiver.sink.connect()


# -- clients without the token ------------------------------------------------------------------------


def client(sink: StreamSink) -> socket.socket:
    return socket.create_connection((sink.address.host, sink.address.port), timeout=10)


@pytest.mark.parametrize("sent", [b"?" * 32 + b"\0" * 8, b"", b"?" * 31], ids=["another", "nothing", "half"])
def test_clients_without_the_token_are_dropped(
    sent: bytes, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_server, "ADMISSION_S", 0.5)
    with client(receiver.sink) as stranger:
        stranger.sendall(sent)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    receiver.sink.send(write)
    receiver.done.result(20)
    assert_new(tmp_path)


def test_three_hundred_silent_clients_do_not_delay_a_worker(way: Any, receiver: Receiver, tmp_path: Path) -> None:
    with contextlib.ExitStack() as clients:
        for _ in range(300):
            clients.enter_context(client(receiver.sink))
        way(receiver.sink).send(write)
        receiver.done.result(20)
    assert_new(tmp_path)


def test_a_worker_that_was_dropped_among_many_clients_tries_again(
    receiver: Receiver, server: ControlServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: list[Message] = []
    first_message = server._first_message

    async def drop_first(peer: Any) -> Message:
        message = await first_message(peer)
        if not dropped:
            dropped.append(message)
            raise ValueError("planned")
        return message

    monkeypatch.setattr(server, "_first_message", drop_first)
    receiver.sink.send(write)
    receiver.done.result(20)
    assert dropped
    assert_new(tmp_path)


# -- the local sink -----------------------------------------------------------------------------------


def test_the_local_sink(tmp_path: Path) -> None:
    sink = LocalSink(tmp_path / "x.pt")
    sink.send(write)
    assert sink.done.result(0) == str(tmp_path / "x.pt")
    other = LocalSink(tmp_path / "y.pt")
    with pytest.raises(TypeError):
        other.send(fails)
    assert isinstance(other.done.exception(0), TypeError)
    assert_new(tmp_path)


def test_a_full_disk_with_the_local_sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.pt").write_bytes(OLD)
    monkeypatch.setattr(durable.DurableFile, "write", full)
    with pytest.raises(OSError, match="No space left") as caught:
        LocalSink(tmp_path / "x.pt").send(write)
    assert caught.value.errno == errno.ENOSPC
    assert_old(tmp_path)


def test_an_abandoned_draft_is_not_renamed(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(OLD)
    sink = LocalSink(tmp_path / "x.pt")

    def write_slowly(file: Any) -> None:
        write(file)
        sink.close(CheckpointError("it took too long"))

    with pytest.raises(CheckpointError):
        sink.send(write_slowly)
    with pytest.raises(CheckpointError, match="it took too long"):
        sink.done.result(0)
    assert_old(tmp_path)
