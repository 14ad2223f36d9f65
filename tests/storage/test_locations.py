"""One suite for every kind of storage: an object is complete, even if its writer was killed."""

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raysgd import CheckpointError
from raysgd.storage import locations, remote
from raysgd.storage.folders import FileEntry, dump_list
from raysgd.storage.locations import Place, place
from raysgd.storage.remote import Uri
from raysgd.train import Checkpoint

fsspec = pytest.importorskip("fsspec")
from fsspec.implementations.local import LocalFileSystem  # noqa: E402


class NotAtomicFileSystem(LocalFileSystem):  # type: ignore[misc]
    """A store that shows a file while it is being written, as sftp or hdfs do."""

    protocol = "shelf"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("shelf://"))


fsspec.register_implementation("shelf", NotAtomicFileSystem, clobber=True)

KINDS = ("path", "file", "memory", "shelf", "s3")
REMOTE = KINDS[2:]


@pytest.fixture
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return a new place of the kind that the test names."""
    kind = request.param
    if kind == "s3":
        return f"{request.getfixturevalue('s3')}/{uuid.uuid4().hex}"
    if kind == "memory":
        return f"memory://{uuid.uuid4().hex}"
    return str(tmp_path) if kind == "path" else f"{kind}://{tmp_path}"


every = pytest.mark.parametrize("root", KINDS, indirect=True)
each_remote = pytest.mark.parametrize("root", REMOTE, indirect=True)


@pytest.fixture
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    (source / "sub").mkdir()
    (source / "sub" / "weights.bin").write_bytes(b"123")
    (source / "empty").write_bytes(b"")
    return source


@every
def test_the_content_is_read_back(root: str) -> None:
    for data in (b"1" * 10, memoryview(b"abc"), bytearray(b"ab"), b""):  # each replaces the one before
        where = locations.write(f"{root}/some/new/folder/a b.pt", data)
        assert locations.read(str(where)) == bytes(data)
    assert where.name == "a b.pt"
    assert where.is_file() and where.exists() and not where.is_dir()
    assert locations.names(where.parent) == ["a b.pt"]
    assert locations.names(place(root) / "some") == ["new"]


@every
def test_a_draft_is_visible_only_after_keep(root: str) -> None:
    draft, dropped = (locations.Draft(f"{root}/{name}") for name in ("a", "b"))
    draft.file.write(b"1" * 100_000)
    dropped.file.write(b"half")
    assert locations.names(place(root)) == []
    assert draft.keep() == place(f"{root}/a")
    dropped.drop()
    assert locations.read(f"{root}/a") == b"1" * 100_000
    assert locations.names(place(root)) == ["a"]
    assert not draft.temporary.exists() and not dropped.temporary.exists()


@every
def test_a_folder_is_stored_and_read(root: str) -> None:
    where = place(f"{root}/folder")
    for number in range(2 if isinstance(where, Uri) else 1):  # the second one replaces the first
        with locations.draft_folder(where) as draft:
            (draft / "weights.bin").write_bytes(b"123")
            (draft / "sub").mkdir()
            (draft / "sub" / "empty").write_bytes(b"")
        assert where.is_dir() and where.exists() and not where.is_file()
        assert number or locations.names(where) == ["sub", "weights.bin"]
    with locations.folder(where) as copy:
        assert (copy / "weights.bin").read_bytes() == b"123"
        assert (copy / "sub" / "empty").read_bytes() == b""


@every
def test_a_folder_whose_writing_fails_does_not_exist(root: str) -> None:
    with pytest.raises(OSError, match="no space"), locations.draft_folder(f"{root}/folder") as draft:
        (draft / "weights.bin").write_bytes(b"1")
        raise OSError("no space left on device")
    assert not place(f"{root}/folder").exists()


@every
def test_delete(root: str) -> None:
    locations.write(f"{root}/kept", b"1")
    locations.write(f"{root}/file", b"1")
    with locations.draft_folder(f"{root}/folder") as draft:
        (draft / "a").write_bytes(b"1")
    for name in ("file", "folder", "never there"):
        locations.delete(place(root) / name)
    assert locations.names(place(root)) == ["kept"]


@every
def test_an_error_about_a_missing_object_has_its_place(root: str) -> None:
    assert locations.names(place(f"{root}/absent")) == []
    assert not place(f"{root}/absent").exists()
    with pytest.raises(CheckpointError, match="there is no checkpoint at") as caught:
        locations.read(f"{root}/absent")
    assert str(place(root)) in str(caught.value)


@each_remote
def test_a_folder_without_its_list_does_not_exist(root: str, files: Path) -> None:
    remote.mirror(Uri(f"{root}/folder"), files)  # as after a crash before the last object
    where = place(f"{root}/folder")
    assert not where.exists()
    with pytest.raises(CheckpointError, match="never finished"), locations.folder(where):
        pass
    locations.delete(where)
    assert locations.names(place(root)) == []


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        (dump_list({"absent": FileEntry(1, "")}), "no checkpoint at"),
        (dump_list({"a": FileEntry(3, "")}), "a has 1 bytes and was stored with 3"),
    ],
)
def test_a_folder_that_was_changed_is_refused(listed: bytes, message: str) -> None:
    root = f"memory://{uuid.uuid4().hex}"
    locations.write(f"{root}/folder/a", b"1")
    locations.write(f"{root}/folder/{remote.MARKER}", listed)
    with pytest.raises(CheckpointError, match=message), locations.folder(place(f"{root}/folder")):
        pass


def test_a_store_that_is_not_atomic_gets_objects_under_a_temporary_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locations.write(f"shelf://{tmp_path}/a", b"old")

    def half(self: Any, path: str, value: bytes, **_: Any) -> None:
        Path(path).write_bytes(value[: len(value) // 2])
        raise OSError("the connection broke")

    monkeypatch.setattr(NotAtomicFileSystem, "pipe_file", half)
    with pytest.raises(CheckpointError, match="the connection broke"):
        locations.write(f"shelf://{tmp_path}/a", b"new and longer")
    assert os.listdir(tmp_path) == ["a"]
    assert locations.read(f"shelf://{tmp_path}/a") == b"old"


def test_logs_that_cannot_be_copied_cause_a_warning(s3: str, files: Path, caplog: pytest.LogCaptureFixture) -> None:
    where = Uri(f"{s3}/{uuid.uuid4().hex}")
    locations.copy_logs(files, where)
    assert locations.read(where / "sub/weights.bin") == b"123"
    locations.copy_logs(files, files.parent)  # for a run on this machine, nothing is copied
    assert caplog.messages == []
    locations.copy_logs(files, Uri("s3://no-such-bucket/logs"))
    assert [str(files) in message and "no-such-bucket" in message for message in caplog.messages] == [True]


# -- a writer that is killed ---------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
from raysgd.storage import locations, remote

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

def folder():
    with locations.draft_folder(sys.argv[1]) as draft:
        for name in "abc":
            (draft / name).write_bytes(b"new " * 1000)

def file():
    locations.write(sys.argv[1], b"new " * 1000)
"""
REMOTE_CUTS = {
    "after the files, before the list": "remote.write = die; folder()",
    "after the first file": """
sent, real = [], remote.upload
def upload(*given):
    if sent:
        die()
    sent.append(real(*given))
remote.upload = upload
folder()
""",
}


def killed(code: str, where: str) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED + code, where], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr


@pytest.mark.parametrize("cut", ["os.replace = die; file()", "os.fsync = die; file()", "os.replace = die; folder()"])
def test_a_writer_that_is_killed_leaves_nothing_under_the_name(tmp_path: Path, cut: str) -> None:
    where = tmp_path / "target"
    killed(cut, str(where))
    assert not where.exists()
    assert locations.names(tmp_path) == [], "drafts are hidden"
    if "file()" in cut:
        locations.write(where, b"old")
        killed(cut, str(where))
        assert locations.read(where) == b"old"


def test_a_stalled_store_ends_the_save_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "STALLED_S", 0.3)
    stuck = threading.Event()
    monkeypatch.setattr(NotAtomicFileSystem, "pipe_file", lambda *_, **__: stuck.wait(20))
    monkeypatch.setattr(NotAtomicFileSystem, "put_file", lambda *_, **__: stuck.wait(20))
    writers: list[Callable[[], Any]] = [
        lambda: locations.write(f"shelf://{tmp_path}/a", b"1"),
        lambda: locations.Draft(f"shelf://{tmp_path}/a").keep(),
    ]
    for write in writers:
        with pytest.raises(CheckpointError, match=r"the store has accepted no data for 0\.3 s"):
            write()
    stuck.set()
    assert locations.names(place(f"shelf://{tmp_path}")) == []


def test_a_slow_store_has_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(remote, "STALLED_S", 0.15)

    def slowly(self: Any, source: str, target: str, callback: Any, **_: Any) -> None:
        for _ in range(8):
            now[0] += 0.1
            callback.relative_update(1)
            time.sleep(0.1)
        Path(target).write_bytes(Path(source).read_bytes())

    monkeypatch.setattr(NotAtomicFileSystem, "put_file", slowly)
    draft = locations.Draft(f"shelf://{tmp_path}/a")
    draft.file.write(b"1")
    draft.keep()
    assert locations.read(f"shelf://{tmp_path}/a") == b"1"


# -- names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "means"),
    [
        ("a/b", Path("a/b")),
        (Path("a"), Path("a")),
        ("C:/a", Path("C:/a")),
        ("~/a b", Path("/home/me/a b")),
        (Path("~/a b"), Path("/home/me/a b")),
        ("file:///a%20b", Path("/a b")),
        ("file:///a b", Path("/a b")),
        ("file://localhost/a b", Path("/a b")),
        ("file://./a", Path("a")),
        ("local:///a%20b", Path("/a%20b")),
        ("simplecache::s3://bucket/a", Uri("simplecache::s3://bucket/a")),
        (Uri("s3://bucket/a"), Uri("s3://bucket/a")),
    ],
)
def test_paths_and_uris_are_distinguished(given: Any, means: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert place(given) == means


def test_the_parts_of_a_uri() -> None:
    uri = Uri("s3://bucket/run/") / "a"
    assert (str(uri), uri.name, str(uri.parent)) == ("s3://bucket/run/a", "a", "s3://bucket/run")
    assert Uri("s3://bucket/run/").name == "run"
    assert str(uri.parent.parent) == "s3://bucket"


# -- stores that cannot be used -----------------------------------------------------------------------


def test_a_missing_bucket(s3: str) -> None:
    tries: list[Callable[[Uri], Any]] = [lambda uri: locations.write(uri, b"1"), remote.probe]
    for tried in tries:
        with pytest.raises(CheckpointError, match=r"s3://no-such-bucket/a.* cannot be written"):
            tried(Uri("s3://no-such-bucket/a"))
    remote.probe(Uri(f"{s3}/fresh"))
    assert locations.names(Uri(f"{s3}/fresh")) == [], "the probe deletes its object"


BLOCKED = """
import sys

class Blocked:
    package = "fsspec"

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
from raysgd.storage import locations
locations.write(sys.argv[1] + "/a", b"1")
locations.write("file://" + sys.argv[1] + "/b", b"1")
for Blocked.package in ("fsspec", "s3fs"):
    try:
        locations.read("s3://bucket/a")
    except ImportError as error:
        print(error)
"""


def test_a_missing_package_is_named_and_local_paths_need_no_package(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", BLOCKED, str(tmp_path)], capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and all("s3://bucket/a" in line for line in lines), done.stdout + done.stderr
    assert "pip install 'raysgd[storage]'" in lines[0] and "s3fs" in lines[1]


def test_only_the_owner_can_read_the_draft_for_a_uri() -> None:
    draft = locations.Draft(f"memory://{uuid.uuid4().hex}/a")
    assert draft.temporary.stat().st_mode & 0o777 == 0o600
    draft.drop()


@pytest.mark.parametrize("cut", REMOTE_CUTS)
def test_a_writer_that_is_killed_leaves_the_old_folder_on_s3(s3: str, cut: str) -> None:
    """A folder with files of the same names is replaced by one list. Without an older one, there is none."""
    where = Uri(f"{s3}/{uuid.uuid4().hex}")
    if cut == "after the files, before the list":
        killed(REMOTE_CUTS[cut], str(where))
        assert locations.names(where), "some files were uploaded"
        assert not where.exists()
        with pytest.raises(CheckpointError, match="never finished"), locations.folder(where):
            pass

    def write(content: bytes) -> None:
        with locations.draft_folder(where) as draft:
            for name in ("a", "b", ".raysgd-dictionary.pt"):
                (draft / name).write_bytes(content)

    def found() -> set[bytes]:
        with locations.folder(where) as local:
            return {(local / name).read_bytes() for name in ("a", "b", ".raysgd-dictionary.pt")}

    write(b"old")
    killed(REMOTE_CUTS[cut], str(where))
    assert found() == {b"old"}
    for number in range(3):
        write(content := Checkpoint.from_dict({"number": number}).to_bytes())
        assert found() == {content} and Checkpoint(where).to_dict() == {"number": number}
    names = locations.names(where)
    assert len(names) <= 5, "the files of older ones are deleted"
