"""Damaged and hostile checkpoints of functions: each is loaded as it was saved, or refused with its name and the cause."""

import collections
import datetime
import io
import json
import logging
import os
import pickle
import socket
import struct
import subprocess
import sys
import tarfile
import threading
import uuid
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from raysgd import CheckpointError, digest, storage
from raysgd.train import Checkpoint
from raysgd.train.keeper import CheckpointKeeper
from tests.files.tally import SOAK, Tallies, flipped, flips, lengths, shown

numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")

FLIPS = 2000 if SOAK else 500
LIST = ".raysgd-folder.json"


def content() -> dict[str, Any]:
    return {
        "epoch": 3,
        "array": numpy.arange(300, dtype="float32").reshape(20, 15),
        "objects": numpy.array([1, "a", None], dtype=object),
        "tensor": torch.arange(64.0).reshape(8, 8).t(),
        "state": torch.nn.Linear(4, 3).state_dict(),
        "plain": [1, 2.5, "text", b"bytes", None, True, (1, (2, 3)), {4, 5}, frozenset([6]), 7j, range(8), slice(1, 2)],
        "more": [
            collections.OrderedDict(a=1),
            collections.Counter("ab"),
            collections.deque([1], 3),
            Path("a/b"),
            Decimal("1"),
        ],
        "default": collections.defaultdict(list, {"a": [1]}),
        "times": [datetime.datetime(2020, 1, 1, tzinfo=datetime.timezone.utc), datetime.timedelta(1), bytearray(b"12")],
    }


CONTENT = content()


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, (numpy.ndarray, torch.Tensor)):
        return bool(one.dtype == other.dtype and one.shape == other.shape and numpy.array_equal(one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, collections.deque)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def is_content(found: Any) -> bool:
    return same(found, CONTENT)


@pytest.fixture(scope="module")
def tallies(request: pytest.FixtureRequest) -> Iterator[Tallies]:
    made = Tallies()
    yield made
    shown(request, made)


@pytest.fixture
def quiet() -> Iterator[None]:
    logger = logging.getLogger("raysgd")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "digest" in record.getMessage()]


# -- dictionaries -------------------------------------------------------------------------------------

WAYS: dict[str, Callable[[Path, bytes], Any]] = {
    "a file": lambda path, data: Checkpoint(path).to_dict(),
    "a trusted file": lambda path, data: Checkpoint(path, trusted=True).to_dict(),
    "bytes": lambda path, data: Checkpoint.from_bytes(data).to_dict(),
    "a file as bytes": lambda path, data: Checkpoint.from_bytes(Checkpoint(path).to_bytes()).to_dict(),
}


@pytest.mark.parametrize("way", WAYS)
def test_flipped_bits_and_missing_ends_of_a_dictionary(tallies: Tallies, quiet: None, tmp_path: Path, way: str) -> None:
    path = Path(Checkpoint.from_dict(CONTENT).to_uri(tmp_path / "saved"))
    data = path.read_bytes()
    named = ["these bytes"] if way == "bytes" else ["saved"] if way != "a file as bytes" else []
    with tallies.of(f"dictionary, {way}") as tally:
        damaged = {f"bit {bit} of byte {place}": flipped(data, place, bit) for place, bit in flips(len(data), FLIPS)}
        damaged |= {f"cut to {length}": data[:length] for length in lengths(len(data))}
        damaged |= {"longer": data + b"x", "doubled": data + data, "zeros behind it": data + bytes(512)}
        for what, found in damaged.items():
            path.write_bytes(found)
            tally.attempt(what, lambda found=found: WAYS[way](path, found), is_content, *named)  # type: ignore[misc]
    assert tally.rejected > 0.9 * tally.tried


def test_a_dictionary_is_still_a_pickle(tmp_path: Path) -> None:
    path = Checkpoint.from_dict(CONTENT).to_uri(tmp_path / "saved")
    with open(path, "rb") as file:
        assert is_content(pickle.load(file))
    assert is_content(pickle.loads(Checkpoint.from_dict(CONTENT).to_bytes()))
    with open(Path(Checkpoint.from_dict(CONTENT).to_directory(), "checkpoint.pkl"), "rb") as file:
        assert is_content(pickle.load(file))


@pytest.mark.parametrize("trusted", [True, False])
def test_an_older_dictionary_is_read_with_one_warning(
    tmp_path: Path, trusted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "older"
    path.write_bytes(pickle.dumps(CONTENT))
    checkpoint = Checkpoint(path, trusted=trusted)
    ways: list[Callable[[], Any]] = [
        checkpoint.to_dict,
        lambda: Checkpoint.from_bytes(checkpoint.to_bytes(), trusted=trusted).to_dict(),
        lambda: Checkpoint.from_bytes(path.read_bytes(), trusted=trusted).to_dict(),
        lambda: Checkpoint(checkpoint.to_directory(), trusted=trusted).to_dict(),
        lambda: Checkpoint(checkpoint.to_uri(tmp_path / "newer"), trusted=trusted).to_dict(),
    ]
    for load in ways:
        caplog.clear()
        assert is_content(load())
        assert len(warnings_of(caplog)) == 1, caplog.messages
    caplog.clear()
    assert is_content(Checkpoint(tmp_path / "newer").to_dict()), "it has one now"
    assert not caplog.messages


def test_damage_of_an_older_dictionary_ends_in_an_error_of_ours(tallies: Tallies, quiet: None, tmp_path: Path) -> None:
    """Without a digest a value can be another one. What cannot be is a raw error, or a crash."""
    path, data = tmp_path / "older", pickle.dumps(CONTENT)
    with tallies.of("dictionary without digest (differences cannot be seen)") as tally:
        for place, bit in flips(len(data), FLIPS):
            path.write_bytes(flipped(data, place, bit))
            tally.attempt(f"{place}.{bit}", Checkpoint(path).to_dict, lambda found: isinstance(found, dict), "older")


# -- folders ------------------------------------------------------------------------------------------


def make_source(folder: Path) -> Path:
    (folder / "sub" / "empty").mkdir(parents=True)
    (folder / "weights.bin").write_bytes(bytes(range(256)) * 12)
    (folder / "sub" / "ä b").write_bytes(b"text" * 100)
    (folder / "sub" / "none").write_bytes(b"")
    Checkpoint.from_directory(folder).set_metadata({"model": "small", "numbers": list(range(30))})
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_source(tmp_path / "source")


def files_of(folder: Any) -> dict[str, bytes]:
    found = {path.relative_to(folder).as_posix(): path for path in Path(folder).rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if name != LIST}


def read_folder(path: Any) -> tuple[dict[str, bytes], Any]:
    checkpoint = Checkpoint(path)
    with checkpoint.as_directory() as folder:
        return files_of(folder), checkpoint.get_metadata()


FOLDER_WAYS: dict[str, Callable[[Any, Path], Any]] = {
    "as_directory": lambda path, new: read_folder(path),
    "to_directory": lambda path, new: read_folder(Checkpoint(path).to_directory(new)),
    "to_bytes": lambda path, new: read_folder(Checkpoint.from_bytes(Checkpoint(path).to_bytes()).to_directory(new)),
    "to_uri": lambda path, new: read_folder(Checkpoint(path).to_uri(new)),
}


@pytest.mark.parametrize("way", FOLDER_WAYS)
def test_flipped_bits_and_missing_parts_of_a_folder(
    tallies: Tallies, quiet: None, source: Path, tmp_path: Path, way: str
) -> None:
    path = Path(Checkpoint.from_directory(source).to_uri(tmp_path / "saved"))
    expected = files_of(source), {"model": "small", "numbers": list(range(30))}
    whole = {file: file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}
    counter = iter(range(10**9))
    with tallies.of(f"folder, {way}") as tally:
        for file, data in whole.items():
            damaged = {f"{b} of {p}": flipped(data, p, b) for p, b in flips(len(data) or 1, FLIPS // 4) if data}
            damaged |= {f"cut to {length}": data[:length] for length in lengths(len(data))}
            damaged |= {"longer": data + b"\n"}
            for what, found in damaged.items():
                file.write_bytes(found)
                load = lambda: FOLDER_WAYS[way](path, tmp_path / f"new{next(counter)}")  # noqa: E731
                tally.attempt(f"{file.name}: {what}", load, lambda got: got == expected, "saved")
            file.unlink()
            if file.name != LIST:  # without it the folder is its owner's
                tally.attempt(f"{file.name}: missing", load, lambda got: got == expected, "saved", "missing")
            file.write_bytes(data)
    assert load() == expected
    assert tally.rejected > 0.8 * tally.tried


def test_damage_of_an_archive(tallies: Tallies, quiet: None, source: Path, tmp_path: Path) -> None:
    data = Checkpoint.from_directory(source).to_bytes()
    expected = files_of(source)

    def load(found: bytes) -> Any:
        with Checkpoint.from_bytes(found).as_directory() as folder:
            return files_of(folder)

    older = data[: -digest.SEAL_BYTES]
    assert load(older) == load(data) == expected
    with tallies.of("archive") as tally:
        for place, bit in flips(len(data), FLIPS):
            tally.attempt(f"{place}.{bit}", lambda p=place, b=bit: load(flipped(data, p, b)), expected.__eq__)  # type: ignore[misc]
        for length in lengths(len(data)):
            tally.attempt(f"cut to {length}", lambda at=length: load(data[:at]), expected.__eq__)  # type: ignore[misc]
    with tallies.of("archive without digest (differences cannot be seen)") as tally:
        for place, bit in flips(len(older), FLIPS, seed=1):
            tally.attempt(f"{place}.{bit}", lambda p=place, b=bit: load(flipped(older, p, b)), lambda found: True)  # type: ignore[misc]


@pytest.mark.parametrize("kind", ["memory", "shelf"])
def test_damage_of_what_lies_under_a_uri(
    tallies: Tallies, quiet: None, source: Path, kind: str, tmp_path: Path
) -> None:
    pytest.importorskip("fsspec")
    if kind == "shelf":
        importlib_places()
    uri = f"{kind}://{tmp_path if kind == 'shelf' else ''}/{uuid.uuid4().hex}"
    file, folder = (
        Checkpoint.from_dict(CONTENT).to_uri(f"{uri}/saved"),
        Checkpoint.from_directory(source).to_uri(f"{uri}/files"),
    )
    expected = files_of(source), Checkpoint(folder).get_metadata()
    places = [f"{uri}/saved", *(f"{uri}/files/{name}" for name in [*expected[0], LIST])]
    with tallies.of(f"{kind}://") as tally:
        for place in places:
            data = storage.read(place)
            damaged = [flipped(data, p, b) for p, b in flips(len(data) or 1, FLIPS // 5) if data]
            for found in [*damaged, *(data[:length] for length in lengths(len(data)))]:
                storage.write(place, found)
                if place == places[0]:
                    tally.attempt(place, lambda: Checkpoint(file).to_dict(), is_content, "saved")
                else:
                    tally.attempt(place, lambda: read_folder(folder), lambda got: got == expected, "files")
            storage.write(place, data)
    assert tally.rejected > 0.8 * tally.tried


def importlib_places() -> None:
    """A store that is not of fsspec's own."""
    import tests.test_places  # noqa: F401


def test_what_a_user_adds_is_left_alone_and_what_is_changed_is_told(source: Path, tmp_path: Path) -> None:
    stored = Checkpoint.from_directory(source).to_directory(tmp_path / "copy")
    Path(stored, "mine.txt").write_text("mine")
    with Checkpoint(stored).as_directory() as folder:
        assert Path(folder, "mine.txt").read_text() == "mine"
    again = Checkpoint(stored).to_directory(tmp_path / "again")
    assert Path(again, "mine.txt").read_text() == "mine"
    Path(stored, "weights.bin").write_bytes(b"mine")
    with (
        pytest.raises(CheckpointError, match=r"copy: weights.bin .*from_directory\(copy\)"),
        Checkpoint(stored).as_directory(),
    ):
        pass
    Path(stored, LIST).unlink()
    with Checkpoint.from_directory(stored).as_directory() as folder:
        assert Path(folder, "weights.bin").read_bytes() == b"mine"


def test_metadata_and_the_list_agree_at_every_moment(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = Checkpoint(Checkpoint.from_directory(source).to_uri(tmp_path / "saved"))
    stored.update_metadata({"more": 1})
    assert read_folder(tmp_path / "saved")[1]["more"] == 1
    writes, real = 0, storage.write
    for allowed in range(4):

        def write(*given: Any, allowed: int = allowed) -> Any:
            nonlocal writes
            writes += 1
            if writes > allowed:
                raise KeyboardInterrupt
            return real(*given)

        writes = 0
        with monkeypatch.context() as patch:
            patch.setattr(storage, "write", write)
            try:
                stored.set_metadata({"try": allowed})
            except KeyboardInterrupt:
                assert allowed < 3
        assert read_folder(tmp_path / "saved")[1] in ({"try": allowed}, {"try": allowed - 1}, {**stored.get_metadata()})
    assert read_folder(tmp_path / "saved")[1] == {"try": 3}


def test_a_list_of_an_older_version_is_read_with_one_warning(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("fsspec")
    uri = f"memory://{uuid.uuid4().hex}/older"
    there = Checkpoint.from_directory(source).to_uri(uri)
    sizes = json.loads(storage.read(f"{uri}/{LIST}"))["files"]
    storage.write(f"{uri}/{LIST}", json.dumps({"format": "raysgd-folder", "files": sizes}).encode())
    with Checkpoint(there).as_directory() as folder:
        assert files_of(folder) == files_of(source)
    assert len(warnings_of(caplog)) == 1


def test_stored_checkpoints_of_a_run_have_digests(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keeper = CheckpointKeeper(tmp_path / "run")
    keeper.take(Checkpoint.from_directory(source).to_bytes(), {})
    keeper.take(Checkpoint.from_dict({"a": 1}).to_bytes(), {})
    first, second = (kept.path for kept in keeper.kept)
    assert read_folder(first)[0] == files_of(source) and Checkpoint(second).to_dict() == {"a": 1}
    assert not caplog.messages, "no warnings"
    for path in (Path(str(first)) / "weights.bin", Path(str(second))):
        path.write_bytes(flipped(path.read_bytes(), 10, 3))
    with pytest.raises(CheckpointError, match=r"checkpoint_000001: weights\.bin"):
        read_folder(first)
    with pytest.raises(CheckpointError, match=r"checkpoint_000002: the file is damaged.*delete"):
        CheckpointKeeper(tmp_path / "run").adopt({})


@pytest.mark.parametrize(
    "listed",
    [
        b"",
        b"[" * 200_000,
        b'{"files": ' * 100_000,
        b"[]",
        b'{"files": []}',
        b'{"files": {"a": -1}}',
        b'{"files": {"a": "1"}}',
        b'{"files": {"a": 1e9}}',
        b'{"files": {"a": true}}',
        b'{"files": {"../a": 1}}',
        b'{"files": {"/etc/passwd": 1}}',
        b'{"files": {"": 1}}',
        b'{"files": {".": 1}}',
        b'{"files": {"a//b": 1}}',
        b'{"files": {"a\\u0000": 1}}',
        b'{"files": {"\\ud800": 1}}',
        b'{"files": {"' + b"a" * 300 + b'": 1}}',
        b'{"files": {"' + b"a/" * 50_000 + b'a": 1}}',
        b'{"files": {"a": ' + b"9" * 5000 + b"}}",
        b'{"files": {"weights.bin": 3072, "weights.bin/a": 1}}',
        b'{"files": {}, "version": 99, "digests": {}}',
        b"\xff\xfe",
    ],
)
@pytest.mark.parametrize("place", ["local", "remote"])
def test_a_hostile_list_is_refused(source: Path, listed: bytes, place: str) -> None:
    where: Any = source
    if place == "remote":
        pytest.importorskip("fsspec")
        where = storage.place(Checkpoint.from_directory(source).to_uri(f"memory://{uuid.uuid4().hex}/files"))
    storage.write(where / LIST, listed)
    for load in (lambda: read_folder(where), lambda: Checkpoint(where).to_bytes()):
        with pytest.raises(CheckpointError) as caught:
            load()
        assert str(where) in str(caught.value)


# -- links, devices and FIFOs -------------------------------------------------------------------------

SECRET = b"a private key"


def private(tmp_path: Path) -> Path:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_bytes(SECRET)
    return tmp_path / "private"


def device(path: Path) -> None:
    try:
        os.mknod(path, 0o666 | 0o020000, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("only root makes devices")


def listening(path: Path) -> None:
    socket.socket(socket.AF_UNIX).bind(str(path))


PLANTED: dict[str, Callable[[Path, Path], Any]] = {
    "a link to a file": lambda folder, secret: (folder / "bad").symlink_to(secret / "key"),
    "a relative link": lambda folder, secret: (folder / "bad").symlink_to(f"../{secret.name}/key"),
    "a link to a directory": lambda folder, secret: (folder / "bad").symlink_to(secret),
    "a link to a link": lambda folder, secret: [
        (secret / "step").symlink_to("key"),
        (folder / "bad").symlink_to(secret / "step"),
    ],
    "a link through a directory": lambda folder, secret: [
        (folder / "bad").symlink_to("sub/../../private/key"),
    ],
    "a link to nothing": lambda folder, secret: (folder / "bad").symlink_to("nothing"),
    "a link to itself": lambda folder, secret: (folder / "bad").symlink_to("bad"),
    "a circle": lambda folder, secret: (folder / "sub" / "bad").symlink_to(".."),
    "a FIFO": lambda folder, secret: os.mkfifo(folder / "bad"),
    "a link to a device": lambda folder, secret: (folder / "bad").symlink_to("/dev/zero"),
    "a device": lambda folder, secret: device(folder / "bad"),
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
def test_what_is_planted_in_a_folder_is_not_followed(
    tmp_path: Path, planted: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec")
    monkeypatch.chdir(tmp_path)  # a socket's path is short
    make_source(Path("source"))
    PLANTED[planted](Path("source"), private(tmp_path))
    caught: list[BaseException] = []

    def copy() -> None:
        try:
            COPIES[way](Checkpoint.from_directory(tmp_path / "source"), tmp_path / "new")
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it hangs"
    assert len(caught) == 1 and isinstance(caught[0], CheckpointError), caught
    assert "bad is " in str(caught[0])
    copied = [path.read_bytes() for path in (tmp_path / "new").rglob("*") if path.is_file()]
    assert SECRET not in copied
    if way.startswith("to_uri"):
        assert not (tmp_path / "new").exists()


def test_links_inside_a_folder_are_followed(source: Path, tmp_path: Path) -> None:
    (source / "link").symlink_to("weights.bin")
    (source / "sub" / "up").symlink_to("../weights.bin")
    (source / "directory").symlink_to("sub")
    (tmp_path / "by link").symlink_to(source)
    for number, way in enumerate(FOLDER_WAYS.values()):
        found, _ = way(tmp_path / "by link", tmp_path / f"new{number}")
        assert found["link"] == found["weights.bin"] == found["sub/up"]
    assert not any(path.is_symlink() for path in (tmp_path / "new1").rglob("*"))


@pytest.mark.parametrize("name", ["checkpoint.pkl", ".metadata.json"])
def test_a_file_with_a_meaning_is_no_link_to_another_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    target = tmp_path / "other.json"
    target.write_bytes(pickle.dumps({"key": 1}) if name.endswith("pkl") else b'{"key": 1}')
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
        for load in (Checkpoint(path).to_dict, Checkpoint(path).to_bytes):
            with pytest.raises(CheckpointError, match=f"{path} is a device, a FIFO"):
                load()


def test_a_folder_is_not_copied_over_itself(source: Path) -> None:
    expected = files_of(source)
    for target in (source, source / "sub" / "deeper"):
        with pytest.raises(CheckpointError, match="into itself"):
            Checkpoint.from_directory(source).to_directory(target)
    assert files_of(source) == expected


def test_logs_are_copied_without_what_they_link_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("fsspec")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.txt").write_bytes(b"1")
    (tmp_path / "logs" / "key").symlink_to(private(tmp_path) / "key")
    os.mkfifo(tmp_path / "logs" / "fifo")
    where = storage.place(f"memory://{uuid.uuid4().hex}")
    storage.copy_logs(tmp_path / "logs", where)
    assert storage.names(where) == ["a.txt"]
    assert sorted(message.split(" is not copied")[0][-4:] for message in caplog.messages) == ["/key", "fifo"]


# -- hostile archives ---------------------------------------------------------------------------------


def tar_of(*members: tarfile.TarInfo, data: bytes = b"x", **given: Any) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", **given) as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(data * max(member.size, 1)) if member.isreg() else None)
    return stream.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, **more: Any) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.size = kind, 1 if kind == tarfile.REGTYPE else 0
    for key, value in more.items():
        setattr(made, key, value)
    return made


def claiming(size: bytes, kind: bytes = b"0", more: bytes = b"") -> bytes:
    """A header with a size of its own, and its right checksum."""
    block = bytearray(tar_of(member("a"))[:512])
    block[124:136], block[156:157] = size, kind
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    return bytes(block) + more + bytes(1024)


def pax(record: bytes) -> bytes:
    padded = record + bytes(-len(record) % 512)
    return claiming(f"{len(record):011o}\0".encode(), b"x", padded + tar_of(member("a")))


ARCHIVES = {
    "a link": tar_of(member("a", tarfile.SYMTYPE, linkname="/etc/passwd")),
    "a link inside": tar_of(member("b"), member("a", tarfile.SYMTYPE, linkname="b")),
    "a hard link": tar_of(member("b"), member("a", tarfile.LNKTYPE, linkname="b")),
    "a link, then a file through it": tar_of(member("a", tarfile.SYMTYPE, linkname="/tmp"), member("a/b")),
    "a device": tar_of(member("a", tarfile.CHRTYPE, devmajor=1, devminor=5)),
    "a block device": tar_of(member("a", tarfile.BLKTYPE)),
    "a FIFO": tar_of(member("a", tarfile.FIFOTYPE)),
    "..": tar_of(member("../a")),
    ".. inside": tar_of(member("b/../../a")),
    "an absolute name": tar_of(member("/tmp/raysgd-hostile")),
    "a long absolute name": tar_of(member("/" + "tmp/" * 60 + "a")),
    "an absolute name in a pax header": pax(b"30 path=/tmp/raysgd-hostile-x\n"),
    "a pax header with a wrong length": pax(b"99999 path=b\n"),
    "a pax header without end": pax(b"5"),
    "a pax header of sparse files": pax(b"29 GNU.sparse.major=1" + b"1" * 7 + b"\n"),
    "a pax header that claims a size": pax(b"24 size=99999999999999\n\n"),
    "a chain of pax headers": claiming(b"00000000000\0", b"x", b"")[:512] * 5000 + tar_of(member("a")),
    "a sparse file": claiming(b"00000000001\0", b"S", bytes(512)),
    "two of one name": tar_of(member("a"), member("a")),
    "a file and a directory of one name": tar_of(member("a"), member("a/b")),
    "the same, by another way": tar_of(member("a/b"), member("a")),
    "no name": tar_of(member("")),
    "the list": tar_of(member(LIST)),
    "a name with a zero": pax(b"14 path=a\0bcd\n"),
    "a very long name": tar_of(member("a" * 300)),
    "a very deep name": tar_of(member("a/" * 5000 + "a")),
    "a huge claim": claiming(b"77777777777\0"),
    "a negative size": claiming(b"\xff" * 12),
    "a size of another kind": claiming(b"\x80" + b"\0" * 3 + b"\x7f" * 8),
    "a negative size of a pax header": claiming(b"\xff" * 12, b"x"),
    "no number": claiming(b"abcdefghijk\0"),
    "a gnu header": claiming(b"00000000003\0", b"L", b"abc" + bytes(509)),
    "no end": tar_of(member("a"))[:1024],
    "half a block": tar_of(member("a"))[:700],
    "a wrong checksum": flipped(tar_of(member("a")), 0, 1),
}


@pytest.mark.parametrize("sealed", [True, False], ids=["with its digest", "without"])
@pytest.mark.parametrize("name", ARCHIVES)
def test_a_hostile_archive_is_refused(tmp_path: Path, quiet: None, name: str, sealed: bool) -> None:
    data = digest.sealed(ARCHIVES[name]) if sealed else ARCHIVES[name]
    before = set(os.listdir("/tmp"))
    with pytest.raises(CheckpointError):
        Checkpoint.from_bytes(data)
    assert not Path("/tmp/raysgd-hostile").exists() and not Path("/tmp/raysgd-hostile-x").exists()
    assert not (set(os.listdir("/tmp")) - before) & {"a", "b"}


def test_no_owner_and_no_special_bit_is_taken_from_an_archive() -> None:
    data = tar_of(
        member("a", mode=0o6777, uid=12345, gid=12345),
        member("b", mode=0o400),
        member("c", tarfile.DIRTYPE, mode=0o1777),
    )
    with Checkpoint.from_bytes(digest.sealed(data)).as_directory() as folder:
        for name in "abc":
            found = Path(folder, name).stat()
            assert found.st_uid == os.getuid() and found.st_mode & 0o7000 == 0
        assert Path(folder, "a").stat().st_mode & 0o100 and not Path(folder, "b").stat().st_mode & 0o111


def test_special_bits_of_a_folder_do_not_travel(source: Path, tmp_path: Path) -> None:
    (source / "weights.bin").chmod(0o6755)
    for number, way in enumerate(list(FOLDER_WAYS.values())[1:]):
        way(source, tmp_path / f"new{number}")
        assert (tmp_path / f"new{number}" / "weights.bin").stat().st_mode & 0o7000 == 0


def test_archives_of_other_versions_are_read(source: Path, quiet: None) -> None:
    for kind in (tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT):
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w", format=kind) as archive:
            archive.add(source, arcname=".")
        with Checkpoint.from_bytes(stream.getvalue()).as_directory() as folder:
            assert files_of(folder) == files_of(source)
    deep = "deep/" * 40 + "a" * 120
    (source / deep).parent.mkdir(parents=True)
    (source / deep).write_bytes(b"1")
    with Checkpoint.from_bytes(Checkpoint.from_directory(source).to_bytes()).as_directory() as folder:
        assert files_of(folder) == files_of(source)


# -- hostile pickles ----------------------------------------------------------------------------------

HEAD = b"\x80\x05}\x8c\x01a"
BIG = struct.pack("<Q", 4 << 30)


def call(module: str, name: str, arguments: bytes) -> bytes:
    return HEAD + f"c{module}\n{name}\n".encode() + arguments + b"Rs."


def nested(levels: int, last: bytes = b"K\x01") -> bytes:
    """((x, x), (x, x)), ... : short in a file, and 2 ** levels long for who walks through it."""
    steps = last + b"\x94" + b"".join(b"h" + bytes([level]) + b"\x86\x94" for level in range(levels))
    return b"\x80\x05}" + steps


def repeated(function: bytes, argument: bytes, count: int) -> bytes:
    """A long argument, once in the file, and many calls with it."""
    return HEAD + b"(" + function + b"\x94" + argument + b"\x94" + b"h\x00h\x01\x85R" * count + b"ts."


def legacy_storage(numel: int) -> bytes:
    """A tensor's storage that claims a size."""
    stream = io.BytesIO()
    torch.save(torch.ones(3).untyped_storage(), stream, _use_new_zipfile_serialization=False)
    real = pickle.dumps(3, 2)[2:-1]
    assert real in stream.getvalue() or b"K\x0c" in stream.getvalue()
    return stream.getvalue().replace(b"K\x0c", b"\x8a\x06" + numel.to_bytes(6, "little"), 1)


def storage_call(data: bytes) -> bytes:
    return call("torch.storage", "_load_from_bytes", b"B" + struct.pack("<I", len(data)) + data + b"\x85")


def zipped_storage() -> bytes:
    stream = io.BytesIO()
    torch.save(torch.ones(3).untyped_storage(), stream)
    return stream.getvalue()


INTEGER = b"\x8a\x06" + (10**12).to_bytes(6, "little")
SCALAR = b"cnumpy\ndtype\n\x8c\x02f8\x89\x88\x87R"
PICKLES = {
    "a huge bytearray, claimed": HEAD + b"\x96" + BIG + b"s.",
    "a huge bytearray, claimed, 55 bytes": (HEAD + b"\x96" + BIG).ljust(54, b"x") + b".",
    "a huge bytearray, called": call("builtins", "bytearray", INTEGER + b"\x85"),
    "huge bytes, claimed": HEAD + b"\x8e" + BIG + b"s.",
    "a huge text, claimed": HEAD + b"\x8d" + BIG + b"s.",
    "a huge frame": b"\x80\x05\x95" + struct.pack("<Q", 1 << 60) + b"}.",
    "a huge number": HEAD + b"\x8b\xff\xff\xff\x7f" + b"s.",
    "a huge list of a range": call("builtins", "list", b"cbuiltins\nrange\n" + INTEGER + b"\x85R\x85"),
    "a huge set of a range": call("builtins", "set", b"cbuiltins\nrange\n" + INTEGER + b"\x85R\x85"),
    "a huge deque of a range": call("collections", "deque", b"cbuiltins\nrange\n" + INTEGER + b"\x85R\x85"),
    "a huge power": call("builtins", "int", b"cdecimal\nDecimal\n\x8c\x0a1e99999999\x85R\x85"),
    "a huge array": call("numpy.core.multiarray", "_reconstruct", b"cnumpy\nndarray\n" + INTEGER + b"\x85C\x01b\x87"),
    "a huge array of objects": HEAD
    + b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R(K\x01"
    + INTEGER
    + b"\x85cnumpy\ndtype\n\x8c\x01O\x89\x88\x87R\x89]tbs.",
    "a huge array from nothing": call(
        "numpy.core.numeric", "_frombuffer", b"(C\x01a" + SCALAR + INTEGER + b"\x85\x8c\x01Ct"
    ),
    "a huge scalar": call("numpy.core.multiarray", "scalar", b"cnumpy\ndtype\n\x8c\x0aV999999999\x89\x88\x87R\x85"),
    "a huge subarray type": call("numpy", "dtype", b"\x8c\x10(99999,99999)f8 \x89\x88\x87"),
    "a list that doubles": HEAD + b"](K\x01K\x02e\x94" + b"h\x00cbuiltins\nslice\nK\x00K\x00\x86Rh\x00s" * 40 + b"s.",
    "a bytearray that doubles": HEAD
    + b"cbuiltins\nbytearray\nC\x0512345\x85R\x94"
    + b"h\x00cbuiltins\nslice\nK\x00K\x00\x86Rh\x00s" * 40
    + b"s.",
    "a key whose hash takes for ever": nested(60) + b"K\x01s.",
    "a set of such keys": nested(60) + b"\x8fh\x3a\x85h\x3b0(h\x3c\x90K\x01s.",
    "a frozenset of such keys": nested(60) + b"(h\x3c\x91K\x01s.",
    "a text of it": nested(40)[: -0 or None] + b"cbuiltins\nstr\nh\x28\x85RK\x01s.",
    "a key so deep that its hash overflows": b"\x80\x05}" + b"K\x01" + b"\x85" * 300_000 + b"K\x01s.",
    "many copies of a list": repeated(b"cbuiltins\nset\n", b"](" + b"K\x01" * 20_000 + b"e", 20_000),
    "many copies of bytes": repeated(
        b"cbuiltins\nbytearray\n", b"B" + struct.pack("<I", 1 << 20) + bytes(1 << 20), 10_000
    ),
    "a huge storage": storage_call(legacy_storage(10**13)),
    "a storage in another form": storage_call(zipped_storage()),
    "a bytearray in a storage": storage_call(
        legacy_storage(12).replace(b"K\x0c", b"cbuiltins\nbytearray\n" + INTEGER + b"\x85R")
    ),
    "a partial that is told another function": HEAD
    + b"ctorch._utils\n_rebuild_parameter\n(cbuiltins\nbytearray\n"
    + INTEGER
    + b"\x85}Ntbs.",
    "a function": HEAD + b"ctorch._utils\n_rebuild_parameter\ns.",
    "an object by NEWOBJ": HEAD + b"ccollections\nOrderedDict\n)\x81s.",
    "an object by INST": HEAD + b"(icollections\nOrderedDict\ns.",
    "an attribute of a class": HEAD + b"ccollections\nOrderedDict\n}\x8c\x01xK\x01sbs.",
    "a class of a dictionary": HEAD + b"ccollections\nOrderedDict\n)RN}\x8c\x09__class__cbuiltins\ndict\ns\x86bs.",
    "another module's function": HEAD + b"cos\nsystem\n\x8c\x04true\x85Rs.",
    "a dotted name": HEAD + b"\x8c\x05torch\x8c\x0bload.__name\x93s.",
    "an extension": HEAD + b"\x82\x01s.",
    "a buffer from outside": HEAD + b"\x97s.",
    "a persistent id": HEAD + b"Pabc\ns.",
    "metadata that are none": b"\x80\x05}\x8c\x09_metadataK\x01s.",
}
FINE = {"metadata that are none"}  # the dictionary itself can be read


@pytest.mark.parametrize("sealed", [True, False], ids=["with its digest", "without"])
@pytest.mark.parametrize("name", PICKLES)
def test_a_hostile_pickle_is_refused(tmp_path: Path, quiet: None, name: str, sealed: bool) -> None:
    path = tmp_path / "given"
    path.write_bytes(digest.sealed(PICKLES[name]) if sealed else PICKLES[name])
    tries: list[Callable[[], Any]] = [Checkpoint(path).get_metadata, Checkpoint(path).to_dict]
    for load in tries[: 1 if name in FINE else 2]:
        with pytest.raises(CheckpointError) as caught:
            load()
        assert "given" in str(caught.value) or name in FINE


def test_deep_nesting_is_read_or_refused(tmp_path: Path, quiet: None) -> None:
    (tmp_path / "deep").write_bytes(HEAD + b"]" * 100_000 + b"a" * 99_999 + b"s.")
    value = Checkpoint(tmp_path / "deep").to_dict()["a"]
    depth = 0
    while value:
        (value,), depth = value, depth + 1
    assert depth == 99_999


MEASURE = """
import logging, pickle, resource, sys, time
from pathlib import Path
import numpy, torch
from raysgd import CheckpointError
from raysgd.train import Checkpoint
logging.getLogger("raysgd").setLevel(logging.ERROR)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
Checkpoint(sys.argv[1] + "/good").to_dict()
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
for path in sorted(Path(sys.argv[1]).iterdir()):
    before, began, refused = peak(), time.monotonic(), 0
    try:
        Checkpoint(path).to_dict()
    except CheckpointError:
        refused = 1
    try:
        Checkpoint.from_bytes(path.read_bytes())
    except CheckpointError:
        pass
    print(path.name, "|", refused, peak() - before, round(time.monotonic() - began, 2))
"""


def test_hostile_files_take_no_memory(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """In a process of its own, whose peak can be seen."""
    for name, data in {**PICKLES, **ARCHIVES}.items():
        (tmp_path / name.replace(".", "dot").replace("/", "_")).write_bytes(data)
    Checkpoint.from_dict(CONTENT).to_uri(tmp_path / "good")
    done = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:], done.stdout[-500:])
    rows = [line.split(" | ") for line in done.stdout.splitlines()]
    grown = {name: int(said.split()[1]) for name, said in rows}
    seconds = {name: float(said.split()[2]) for name, said in rows}
    assert len(grown) == len(PICKLES) + len(ARCHIVES) + 1
    worst, slowest = max(grown, key=grown.__getitem__), max(seconds, key=seconds.__getitem__)
    reporter: Any = request.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.write_line(
            f"\nhostile files: {len(grown)}, peak memory +{sum(grown.values())} MiB in all, +{grown[worst]} MiB for {worst!r}, "
            f"slowest {seconds[slowest]} s for {slowest!r}"
        )
    assert grown[worst] < 300, grown
    assert seconds[slowest] < 60, seconds
