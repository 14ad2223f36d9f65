"""A file is complete or absent, whatever happens while it is written."""

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from raysgd import CheckpointError, storage


def explode(*_: Any) -> None:
    raise OSError("no space left on device")


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_crash_in_the_middle_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    target = tmp_path / "model.pt"
    storage.write(target, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, step, explode)
        with pytest.raises(OSError, match="no space"):
            storage.write(target, b"new and longer")
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"], "nothing half-written stays behind"


def test_an_interruption_leaves_the_old_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ctrl_c(*_: Any) -> None:
        raise KeyboardInterrupt

    target = tmp_path / "model.pt"
    storage.write(target, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            storage.write(target, b"new")
    assert os.listdir(tmp_path) == ["model.pt"]
    assert storage.read(target) == b"old"


def test_it_is_synced_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("sync"), sync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("rename"), replace(a, b))[1])
    storage.write(tmp_path / "a", b"1")
    assert order[:2] == ["sync", "rename"]


@pytest.mark.parametrize("data", [b"", b"1" * 10, memoryview(b"abc"), bytearray(b"abc")])
def test_what_is_written_is_read(tmp_path: Path, data: Any) -> None:
    target = storage.write(str(tmp_path / "some" / "new" / "folder" / "a.pt"), data)
    assert target == tmp_path / "some" / "new" / "folder" / "a.pt"
    assert storage.read(target) == bytes(data)


def test_others_may_read_it_as_the_umask_says(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        target = storage.write(tmp_path / "a.pt", b"1")
    finally:
        os.umask(old)
    assert stat.S_IMODE(target.stat().st_mode) == 0o644


def test_a_directory_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):
        storage.write(tmp_path / "taken", b"1")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize(("name", "says"), [("missing.pt", "there is no checkpoint at"), ("", "is a directory")])
def test_reading_what_is_no_file(tmp_path: Path, name: str, says: str) -> None:
    with pytest.raises(CheckpointError, match=says) as caught:
        storage.read(tmp_path / name)
    assert str(tmp_path) in str(caught.value)
