"""Links, devices and special files that an attacker adds to a folder, or to its archive, are refused."""

import io
import os
import socket
import tarfile
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raysgd import CheckpointError, ConfigError
from raysgd.train import Checkpoint
from tests import storing
from tests.storage.function_cases import FOLDER_WAYS, files_of, make_source


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_source(tmp_path / "source")


# -- links, devices and FIFOs -------------------------------------------------------------------------

SECRET = b"a private key"


def private(tmp_path: Path) -> Path:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_bytes(SECRET)
    return tmp_path / "private"


def listening(path: Path) -> None:
    socket.socket(socket.AF_UNIX).bind(str(path))


PLANTED: dict[str, Callable[[Path, Path], Any]] = {
    "a link to a file": lambda folder, secret: (folder / "bad").symlink_to(secret / "key"),
    "a link to a directory": lambda folder, secret: (folder / "bad").symlink_to(secret),
    "a link through a directory": lambda folder, secret: [(folder / "bad").symlink_to("sub/../../private/key")],
    "a circle": lambda folder, secret: (folder / "sub" / "bad").symlink_to(".."),
    "a FIFO": lambda folder, secret: os.mkfifo(folder / "bad"),
    "a socket": lambda folder, secret: listening(folder / "bad"),
}

COPIES: dict[str, Callable[[Checkpoint, Path], Any]] = {
    "to_bytes": lambda checkpoint, new: checkpoint.to_bytes(),
    "to_directory": lambda checkpoint, new: checkpoint.to_directory(new),
    "to_uri, a path": lambda checkpoint, new: checkpoint.to_uri(new),
    "to_uri": lambda checkpoint, new: checkpoint.to_uri(f"memory://{new.name}{uuid.uuid4().hex}"),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("planted", PLANTED)
def test_links_and_special_files_in_a_folder_are_refused(
    tmp_path: Path, planted: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec")
    monkeypatch.chdir(tmp_path)  # because the path of a socket must be short
    make_source(Path("source"))
    PLANTED[planted](Path("source"), private(tmp_path))
    with pytest.raises(CheckpointError, match="bad is "):
        COPIES[way](Checkpoint.from_directory(tmp_path / "source"), tmp_path / "new")
    copied = [path.read_bytes() for path in (tmp_path / "new").rglob("*") if path.is_file()]
    assert SECRET not in copied
    if way.startswith("to_uri"):
        assert not (tmp_path / "new").exists()


def test_the_folder_itself_may_be_a_link(source: Path, tmp_path: Path) -> None:
    expected = files_of(source)
    (tmp_path / "by link").symlink_to(source)
    for number, way in enumerate(FOLDER_WAYS.values()):
        found, _ = way(tmp_path / "by link", tmp_path / f"new{number}")
        assert found == expected


@pytest.mark.parametrize("name", [".raysgd-dictionary.pt", ".metadata.json"])
def test_special_files_of_a_checkpoint_must_not_be_links(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    target = tmp_path / "other.json"
    target.write_bytes(Checkpoint.from_dict({"key": 1}).to_bytes() if name.endswith("pt") else b'{"key": 1}')
    before = target.read_bytes()
    (tmp_path / "folder" / name).symlink_to(target)
    checkpoint = Checkpoint.from_directory(tmp_path / "folder")
    for load in (checkpoint.to_dict, checkpoint.get_metadata, lambda: checkpoint.set_metadata({"a": 1})):
        if name.endswith("json") or load == checkpoint.to_dict:
            with pytest.raises(CheckpointError):
                load()
    assert target.read_bytes() == before


def test_a_checkpoint_that_is_a_device_or_a_fifo_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(ConfigError, match=f"{path} is a (named pipe|character device)"):
            Checkpoint(path)


def test_a_folder_is_not_copied_over_itself(source: Path) -> None:
    expected = files_of(source)
    for target in (source, source / "sub" / "deeper"):
        with pytest.raises(CheckpointError, match="into itself"):
            Checkpoint.from_directory(source).to_directory(target)
    assert files_of(source) == expected


def test_logs_are_copied_without_the_targets_of_links(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("fsspec")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.txt").write_bytes(b"1")
    (tmp_path / "logs" / "key").symlink_to(private(tmp_path) / "key")
    os.mkfifo(tmp_path / "logs" / "fifo")
    where = f"memory://{uuid.uuid4().hex}"
    storing.copy_logs(tmp_path / "logs", where)
    assert storing.names(where) == ["a.txt"]
    assert sorted(message.split(" is not copied")[0][-4:] for message in caplog.messages) == ["/key", "fifo"]


# -- archives -----------------------------------------------------------------------------------------


def tar_of(*members: tarfile.TarInfo) -> bytes:
    """Return an archive of these members, with the list of its files at the end."""
    listed = storing.list_of({each.name.lstrip("/"): b"x" * each.size for each in members if each.isreg()})
    last, stream = member(storing.LIST), io.BytesIO()
    last.size = len(listed)
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for each in members:
            archive.addfile(each, io.BytesIO(b"x" * each.size) if each.isreg() else None)
        archive.addfile(last, io.BytesIO(listed))
    return stream.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, **more: Any) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.size = kind, 1 if kind == tarfile.REGTYPE else 0
    for key, value in more.items():
        setattr(made, key, value)
    return made


ARCHIVES = {
    "a link": [member("a", tarfile.SYMTYPE, linkname="/etc/passwd")],
    "a hard link": [member("b"), member("a", tarfile.LNKTYPE, linkname="b")],
    "a link, then a file through it": [member("a", tarfile.SYMTYPE, linkname=".."), member("a/b")],
    "a device": [member("a", tarfile.CHRTYPE, devmajor=1, devminor=5)],
    "a FIFO": [member("a", tarfile.FIFOTYPE)],
    "..": [member("../outside")],
    "a file and a directory of one name": [member("a"), member("a/b")],
    "a very long name": [member("a" * 300)],
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_with_anything_but_files_is_refused(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(CheckpointError, match="only regular files"):
        Checkpoint.from_bytes(tar_of(*ARCHIVES[name]))
    assert not list(tmp_path.rglob("outside"))


def test_an_archive_without_its_list_or_with_another_one_is_refused() -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.addfile(member("a"), io.BytesIO(b"x"))
    with pytest.raises(CheckpointError, match="list at the end of the archive is missing"):
        Checkpoint.from_bytes(stream.getvalue())
    good = tar_of(member("a"), member("b"))
    for damaged, said in ((good.replace(b"x", b"y", 1), "a does not have the digest"), (good[1024:], "a is missing")):
        with pytest.raises(CheckpointError, match=said):
            Checkpoint.from_bytes(damaged)


def test_special_bits_are_not_copied(source: Path, tmp_path: Path) -> None:
    (source / "weights.bin").chmod(0o6755)
    for number, way in enumerate(list(FOLDER_WAYS.values())[1:]):
        way(source, tmp_path / f"new{number}")
        assert (tmp_path / f"new{number}" / "weights.bin").stat().st_mode & 0o7000 == 0
