"""A file is complete or absent, whatever happens while it is written."""

import gc
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raysgd import CheckpointError, ConfigError
from raysgd.storage import locations
from raysgd.storage.durable import DurableFile


def explode(*_: Any) -> None:
    raise OSError("no space left on device")


def pressed(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize(("step", "fails"), [("fsync", explode), ("replace", explode), ("fsync", pressed)])
def test_a_failure_while_writing_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, fails: Any, link: bool
) -> None:
    target = tmp_path / "model.pt"
    locations.write(tmp_path / "real" if link else target, b"old")
    if link:
        target.symlink_to("real")
    before = sorted(os.listdir(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, step, fails)
        with pytest.raises((OSError, KeyboardInterrupt)):
            locations.write(target, b"new and longer")
    assert target.is_symlink() is link and locations.read(target) == b"old"
    assert sorted(os.listdir(tmp_path)) == before, "no draft is left"


def test_ctrl_c_while_a_draft_is_made_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Pressed(DurableFile):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(locations, "DurableFile", Pressed)
        with pytest.raises(KeyboardInterrupt) as caught:
            locations.Draft(tmp_path / "a")
    assert os.listdir(tmp_path) == [], "the error's traceback may keep the draft for long"
    assert caught.value.__traceback__ is not None
    locations.Draft(tmp_path / "a")  # as if Ctrl-C came before the caller has it
    gc.collect()
    assert os.listdir(tmp_path) == []


def test_a_file_is_on_the_disk_before_it_is_renamed_and_the_new_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    real, replace = os.fsync, os.replace

    def sync(descriptor: int) -> None:
        order.append("sync folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "sync")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", lambda a, b: (order.append("rename"), replace(a, b))[1])
    locations.write(tmp_path / "a", b"1")
    assert order == ["sync", "rename", "sync folder"]
    order.clear()
    locations.write(tmp_path / "new" / "a", b"1")
    assert order == ["sync folder", "sync", "rename", "sync folder"], "the new folder's name too"
    order.clear()
    with locations.draft_folder(tmp_path / "folder") as draft:
        (draft / "a").write_bytes(b"1")
    assert order == ["sync", "sync", "sync folder", "rename", "sync folder"]


def test_the_umask_decides_who_may_read_the_file(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        target = locations.write(tmp_path / "a.pt", b"1")
    finally:
        os.umask(old)
    assert stat.S_IMODE(target.stat().st_mode) == 0o644


def test_a_directory_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):
        locations.write(tmp_path / "taken", b"1")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_folder_is_not_read_as_a_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{tmp_path}.* is a directory"):
        locations.read(tmp_path)


# -- links are followed, and special files are refused ------------------------------------------------


@pytest.mark.parametrize("old", [b"old", None], ids=["there", "dangling"])
@pytest.mark.parametrize("absolute", [True, False])
def test_a_link_is_kept_and_its_target_is_written(tmp_path: Path, old: bytes | None, absolute: bool) -> None:
    aim = tmp_path / "elsewhere" / "real.pt"
    (tmp_path / "links").mkdir()
    if old is not None:
        aim.parent.mkdir()
        aim.write_bytes(old)
    (tmp_path / "links" / "first").symlink_to(aim if absolute else "../elsewhere/real.pt")
    link = tmp_path / "links" / "second"
    link.symlink_to("first")
    assert locations.write(link, b"new") == link
    assert link.is_symlink() and (tmp_path / "links" / "first").is_symlink()
    assert aim.read_bytes() == b"new" and not aim.is_symlink()
    assert os.listdir(aim.parent) == ["real.pt"] and sorted(os.listdir(link.parent)) == ["first", "second"]


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


SPECIAL: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "socket": make_socket,
    "link to a pipe": lambda path: (os.mkfifo(path.parent / "pipe"), path.symlink_to("pipe"))[1],
    "link to a device": lambda path: path.symlink_to("/dev/null"),
    "link to a folder": lambda path: path.symlink_to(path.parent, target_is_directory=True),
    "link to itself": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize(
    ("kind", "folder"), [(kind, folder) for kind in SPECIAL for folder in {False, kind != "link to a folder"}]
)
def test_devices_pipes_and_directories_are_refused(
    tmp_path: Path, kind: str, folder: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's name must be short
    SPECIAL[kind](Path("x").absolute() if kind != "socket" else Path("x"))
    before = {name: os.lstat(name).st_mode for name in os.listdir()}
    with pytest.raises((ConfigError, OSError)) as caught:
        if folder:
            with locations.draft_folder(tmp_path / "x"):
                pass
        else:
            locations.write(tmp_path / "x", b"new")
    assert str(tmp_path / "x") in str(caught.value)
    assert {name: os.lstat(name).st_mode for name in os.listdir()} == before


@pytest.mark.parametrize("there", [True, False])
def test_a_link_to_a_folder_is_kept_and_the_folder_is_written(tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with locations.draft_folder(tmp_path / "link") as draft:
        (draft / "new").write_bytes(b"new")
    assert (tmp_path / "link").is_symlink() and locations.names(tmp_path / "real") == ["new"]
    assert sorted(os.listdir(tmp_path)) == ["link", "real"]


@pytest.mark.parametrize("old", ["file", "folder"])
def test_what_is_there_is_not_replaced_by_a_folder(tmp_path: Path, old: str) -> None:
    where = tmp_path / "x"
    locations.write(where if old == "file" else where / "old", b"old")
    with pytest.raises(OSError), locations.draft_folder(where) as draft:
        (draft / "new").write_bytes(b"new")
    assert os.listdir(tmp_path) == ["x"]
    assert locations.read(where if old == "file" else where / "old") == b"old"
