"""A durable file is on the disk after `sync`, which also raises errors of the thread that flushes."""

import errno
import os
import random
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raysgd import AutoCheckpoint, CheckpointError
from raysgd.storage import durable, locations
from raysgd.storage.durable import DurableFile
from tests.torch.small import inline

DATA = random.Random(3).randbytes(100_000)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "PIECE", 10_000)


def written(file: DurableFile, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


@pytest.mark.parametrize("at_once", [10_000, 12_345])
def test_the_file_has_what_was_written(tmp_path: Path, at_once: int) -> None:
    with DurableFile(tmp_path / "a") as file:
        for start in range(0, len(DATA), at_once):
            written(file, DATA[start : start + at_once])
        file.sync()
    assert (tmp_path / "a").read_bytes() == DATA


def test_writing_continues_while_a_thread_flushes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    first = threading.Event()

    def to_disk(descriptor: int) -> None:
        sizes.append(os.fstat(descriptor).st_size)
        first.wait(60)

    monkeypatch.setattr(durable, "_to_disk", to_disk)
    with DurableFile(tmp_path / "a") as file:
        written(file, DATA[:9_000])
        assert sizes == [] and file._thread is None, "a small file needs no thread"
        written(file, DATA[9_000:])  # does not wait for the piece that is being flushed
        first.set()
        file.sync()
    assert len(sizes) == 1 and sizes[0] >= 10_000


def test_an_error_of_the_flushing_thread_is_raised_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: int) -> None:
        raise OSError("the disk has failed")

    monkeypatch.setattr(durable, "_to_disk", broken)
    target = tmp_path / "model.pt"
    target.write_bytes(b"old")
    with pytest.raises(OSError, match="the disk has failed"):
        locations.write(target, DATA[:10_000])  # only one piece, so no later write can raise the error
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["model.pt"]


def test_no_thread_is_started_while_the_interpreter_exits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ending:
        def submit(self, *_: object) -> None:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")

        def shutdown(self) -> None:
            pass

    monkeypatch.setattr(durable, "ThreadPoolExecutor", lambda *_, **__: Ending())
    locations.write(tmp_path / "a", DATA)
    assert (tmp_path / "a").read_bytes() == DATA


def test_the_descriptor_is_closed_only_after_the_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []

    def slow(descriptor: int) -> None:
        threading.Event().wait(0.2)
        os.fstat(descriptor)  # raises an error if it was closed meanwhile
        ended.append(descriptor)

    monkeypatch.setattr(durable, "_to_disk", slow)
    file = DurableFile(tmp_path / "a")
    written(file, DATA[:20_000])
    descriptor = file.fileno()
    file.close()
    assert ended[:1] == [descriptor]


def write_record(folder: Path) -> None:
    locations.write(folder / "a.json", b"{}")


def save_model(folder: Path) -> None:
    with inline() as trainer:
        trainer.save(folder / "a.pt")


def write_report(folder: Path) -> None:
    with inline() as trainer:
        trainer.report(folder / "a.html")


def save_automatically(folder: Path) -> None:
    with inline(checkpoints=AutoCheckpoint(path=folder)) as trainer:
        trainer.fit(1, progress=False)


WAYS: list[tuple[Callable[[Path], None], str, str]] = [
    (write_record, "", r"\.a\.json"),
    (save_model, "the save to {folder}/a.pt failed: ", r"\.a\.pt"),
    (write_report, "", r"\.a\.html"),
    (save_automatically, "the save to {folder}/loop1-", r"\.loop.*\.pt"),
    (save_automatically, "the automatic checkpoint in {folder} could not be saved: ", r"\.loop.*\.json"),
]


@pytest.mark.parametrize(("way", "part", "file"), WAYS)
@pytest.mark.filterwarnings("ignore:the training loader does not shuffle")
def test_a_full_disk_names_the_file_and_what_failed(
    way: Callable[[Path], None], part: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device /dev/full is always full."""
    opened, drafts = os.open, re.compile(rf"{re.escape(str(tmp_path))}/{file}\.\w+\.tmp")

    def full(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if drafts.fullmatch(str(path)):
            return opened("/dev/full", os.O_WRONLY)
        return opened(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", full)
    with pytest.raises((OSError, CheckpointError)) as caught:
        way(tmp_path)
    text, error = str(caught.value), caught.value
    assert part.format(folder=tmp_path) in text and "No space left on device. The file is incomplete" in text
    assert drafts.search(text) and "Free space there, or choose" in text
    assert isinstance(error, CheckpointError) or error.errno == errno.ENOSPC
    assert not list(tmp_path.glob("*.tmp")) and not list(tmp_path.glob("a.*"))
