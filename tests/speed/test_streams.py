"""A checkpoint's way to its file: through the file system where both see it, else over the wire; all or nothing."""

import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd import CheckpointError
from raysgd.torch.streams import LocalSink, Receiver, StreamSink

CONTENT = {"x": torch.arange(3_000_000, dtype=torch.float32), "name": "here"}


def over_the_wire(sink: Any) -> Any:
    return replace(sink, draft="/nowhere/at/all")


WAYS = {"file": lambda sink: sink, "wire": over_the_wire}


@pytest.fixture(params=list(WAYS))
def way(request: pytest.FixtureRequest) -> Callable[[Any], StreamSink]:
    return WAYS[request.param]


def write(file: Any) -> None:
    torch.save(CONTENT, file)


def fails(file: Any) -> None:
    file.write(b"half of it")
    raise TypeError("cannot pickle this")


def test_what_arrives_is_what_was_sent(way: Any, tmp_path: Path) -> None:
    receiver = Receiver(tmp_path / "deep" / "x.pt", "127.0.0.1", again=False)
    way(receiver.sink).send(write)
    assert receiver.done.result(20) == str(tmp_path / "deep" / "x.pt")
    read = torch.load(tmp_path / "deep" / "x.pt")
    assert torch.equal(read["x"], CONTENT["x"]) and read["name"] == "here"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["x.pt"]


def test_the_file_system_is_used_where_both_see_it(tmp_path: Path) -> None:
    receiver = Receiver(tmp_path / "x.pt", "127.0.0.1", again=False)
    stream = receiver.sink.connect()
    assert stream._direct == receiver.sink.draft
    Path(receiver.sink.draft).write_bytes(b"a file of another machine, of the same name")
    assert receiver.sink._seen_here() is None
    stream._connection.close()
    assert isinstance(receiver.done.exception(20), CheckpointError)


def test_an_error_on_the_way_is_told_and_leaves_nothing(way: Any, tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(b"the old one")
    receiver = Receiver(tmp_path / "x.pt", "127.0.0.1", again=True)
    with pytest.raises(TypeError):
        way(receiver.sink).send(fails)
    with pytest.raises(CheckpointError, match="TypeError: cannot pickle this"):
        receiver.done.result(20)
    assert settled(tmp_path) == ["x.pt"] and (tmp_path / "x.pt").read_bytes() == b"the old one"


def settled(folder: Path) -> list[str]:
    """The receiver's thread tidies up just after it has told the result."""
    for _ in range(100):
        names = sorted(path.name for path in folder.iterdir())
        if not any(name.endswith(".tmp") for name in names):
            break
        time.sleep(0.05)
    return names


def test_a_broken_stream_may_be_followed_by_another(way: Any, tmp_path: Path) -> None:
    receiver = Receiver(tmp_path / "x.pt", "127.0.0.1", again=True)
    broken = over_the_wire(receiver.sink).connect()
    broken.write(b"half of it")
    broken._connection.close()
    time.sleep(0.2)
    way(receiver.sink).send(write)
    receiver.done.result(20)
    assert torch.equal(torch.load(tmp_path / "x.pt")["x"], CONTENT["x"])


def test_or_is_the_end_of_the_save(way: Any, tmp_path: Path) -> None:
    receiver = Receiver(tmp_path / "x.pt", "127.0.0.1", again=False)
    stream = way(receiver.sink).connect()
    stream._connection.close()
    with pytest.raises(CheckpointError, match="was lost"):
        receiver.done.result(20)
    assert settled(tmp_path) == []


def test_strangers_are_not_heard(tmp_path: Path) -> None:
    receiver = Receiver(tmp_path / "x.pt", "127.0.0.1", again=False)
    with socket.create_connection((receiver.sink.host, receiver.sink.port)) as stranger:
        stranger.sendall(b"?" * 32 + b"\0" * 8)
        stranger.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    receiver.sink.send(write)
    assert receiver.done.result(20)


def test_a_receiver_nobody_will_use_ends(tmp_path: Path) -> None:
    receiver = Receiver(tmp_path / "x.pt", "127.0.0.1", again=True)
    receiver.close()
    with pytest.raises(CheckpointError, match="given up"):
        receiver.done.result(20)
    assert settled(tmp_path) == []


def test_in_this_process(tmp_path: Path) -> None:
    sink = LocalSink(tmp_path / "x.pt")
    sink.send(write)
    assert torch.equal(torch.load(sink.done.result(0))["x"], CONTENT["x"])
    other = LocalSink(tmp_path / "y.pt")
    with pytest.raises(TypeError):
        other.send(fails)
    assert isinstance(other.done.exception(0), TypeError)
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]
