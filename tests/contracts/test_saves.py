"""A checkpoint is what its worker wrote, or the older one: whether the worker sees the driver's file or not, blocking or not."""

import contextlib
import errno
import os
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from raysgd import CheckpointError
from raysgd.core.control import Control
from raysgd.storage import durable
from raysgd.trainer import saves
from raysgd.trainer.saves import SaveHandle, Saves
from raysgd.workers.control_server import ControlServer
from raysgd.workers.transfer import Giving, Transfer

CONTENT = {"x": torch.arange(300_000, dtype=torch.float32), "name": "here"}
OLD = b"the old one"
Write = Callable[[Any], Any]


class Worker:
    """A replica whose checkpoint is what a function of the test writes."""

    def __init__(self, control: Control, write: Write) -> None:
        self.control, self.write = control, write

    def checkpoint_writer(self, *, later: bool) -> Write:
        return self.write


class Engine:
    """Lets a worker for each of `writes` make the call: all but the last one fail, or seem to."""

    def __init__(self, server: ControlServer, *, seen: bool) -> None:
        self._server, self._seen, self.address = server, seen, server.address_for_workers()
        self.group = self.calls = self
        self.limits = SimpleNamespace(hang_s=20.0)
        self.writes: list[Write] = [lambda file: torch.save(CONTENT, file)]
        self.control = Control()
        self.wait: Callable[[], Any] = lambda: None  # after each of them
        self.opened: list[Giving] = []
        self.control.giving = self._giving

    def transfer(self) -> Transfer:
        return Transfer(self._server)

    def _giving(self, name: str) -> Giving:
        self.opened.append(Giving(self.address, "w", name))
        return self.opened[-1]

    def run(self, job: Any) -> Any:
        for write in self.writes:
            arguments = {**job.call.arguments, **job.prepare()}
            if "draft" in arguments and not self._seen:  # on another machine, which has no such file
                arguments["draft"] += ".elsewhere"
            value = job.call.method(Worker(self.control, write), **arguments)
            self.wait()
        return [SimpleNamespace(values=[value])]


@pytest.fixture(params=["seen", "unseen"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    (tmp_path / "x.pt").write_bytes(OLD)
    server = ControlServer(queue.SimpleQueue(), "127.0.0.1")
    yield Engine(server, seen=request.param == "seen")
    server.close()


@pytest.fixture(params=[True, False], ids=["blocking", "background"])
def save(request: pytest.FixtureRequest, engine: Engine, tmp_path: Path) -> Callable[[], Any]:
    """Return a function that saves to x.pt, and returns when that has ended."""

    def run() -> None:
        saving = Saves(engine)  # type: ignore[arg-type]
        made = saving.save(tmp_path / "x.pt", blocking=request.param)
        if isinstance(made, SaveHandle):
            made.result(60)

    return run


def in_background(engine: Engine, folder: Path) -> tuple[Saves, SaveHandle]:
    saving = Saves(engine)  # type: ignore[arg-type]
    handle = saving.save(folder / "x.pt", blocking=False)
    assert isinstance(handle, SaveHandle)
    return saving, handle


def assert_new(folder: Path) -> None:
    read = torch.load(folder / "x.pt")
    assert torch.equal(read["x"], CONTENT["x"]) and read["name"] == "here"
    assert os.listdir(folder) == ["x.pt"]


def assert_old(folder: Path) -> None:
    assert (folder / "x.pt").read_bytes() == OLD
    assert os.listdir(folder) == ["x.pt"]


def test_the_file_is_what_the_worker_wrote(save: Callable[[], Any], tmp_path: Path) -> None:
    save()
    assert_new(tmp_path)


def test_an_error_of_the_worker_leaves_the_old_file(save: Callable[[], Any], engine: Engine, tmp_path: Path) -> None:
    def fails(file: Any) -> None:
        file.write(b"half of it")
        raise TypeError("cannot pickle this")

    engine.writes = [fails]
    with pytest.raises((TypeError, CheckpointError), match="cannot pickle this"):
        save()
    assert_old(tmp_path)


def test_a_worker_that_seemed_to_fail_never_mixes_its_bytes_with_another_ones(engine: Engine, tmp_path: Path) -> None:
    """It continues to write while the other one does, and when the save is complete."""
    began, goes_on = threading.Event(), threading.Event()

    def lost(file: Any) -> None:
        file.write(b"bytes of the first" * 100_000)
        began.set()
        goes_on.wait(60)
        file.write(b"bytes of the first" * 100_000)

    engine.writes, engine.wait = [lost, *engine.writes], lambda: began.wait(60)
    _, handle = in_background(engine, tmp_path)
    handle.result(60)
    assert_new(tmp_path)
    goes_on.set()
    for thread in threading.enumerate():
        if thread.name == "raysgd-save":
            thread.join(60)
    assert_new(tmp_path)


def test_a_worker_that_ends_in_the_background_ends_the_save(engine: Engine, tmp_path: Path) -> None:
    ends = threading.Event()
    engine.writes = [lambda file: ends.wait(60)]
    _, handle = in_background(engine, tmp_path)
    engine.opened[-1]._connection.close()
    with pytest.raises(CheckpointError, match="the worker that was sending the checkpoint failed"):
        handle.result(60)
    assert_old(tmp_path)
    ends.set()


def test_a_save_that_does_not_move_is_given_up(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saves, "STALL_AT_LEAST_S", 0.5)
    engine.limits.hang_s, goes_on = 0.5, threading.Event()
    engine.writes = [lambda file: (file.write(b"half of it" * 1_000_000), file.flush(), goes_on.wait(60))]
    _, handle = in_background(engine, tmp_path)
    with pytest.raises(CheckpointError, match=r"it has made no progress for 0\.5 s"):
        handle.result(60)
    assert_old(tmp_path)
    goes_on.set()


def test_a_save_that_was_abandoned_does_not_replace_the_old_file(engine: Engine, tmp_path: Path) -> None:
    goes_on = threading.Event()
    engine.writes = [lambda file: (torch.save(CONTENT, file), goes_on.wait(60))]
    saving, handle = in_background(engine, tmp_path)
    saving.abandon()
    goes_on.set()
    with pytest.raises(CheckpointError, match="abandoned"):
        handle.result(60)
    assert_old(tmp_path)


def flip_a_bit(draft: Path) -> None:
    """Change the end of the draft. (Every `load` verifies the checksums of what is before that.)"""
    with open(draft, "r+b") as file:
        file.seek(-1000, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "longer": lambda draft: os.truncate(draft, 2_000_000),
    "shorter": lambda draft: os.truncate(draft, 500_000),
    "changed": flip_a_bit,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("engine", ["seen"], indirect=True)
def test_a_draft_that_something_else_has_changed_does_not_replace_the_old_file(
    damage: str, save: Callable[[], Any], engine: Engine, tmp_path: Path
) -> None:
    def write_and_damage(file: Any) -> None:
        torch.save(CONTENT, file)
        file.flush()
        (draft,) = tmp_path.glob(".*.tmp")
        DAMAGES[damage](draft)

    engine.writes = [write_and_damage]
    with pytest.raises(CheckpointError, match="is not what the worker wrote"):
        save()
    assert_old(tmp_path)


def test_a_full_disk_is_reported_as_such(
    save: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: Any, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(durable.DurableFile, "write", full)
    with pytest.raises((OSError, CheckpointError), match="No space left on device"):
        save()
    with contextlib.suppress(FileNotFoundError):
        assert_old(tmp_path)
