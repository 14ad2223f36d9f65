"""A damaged checkpoint of a training function is loaded as it was saved, or refused with an error that names it and the cause."""

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raysgd import CheckpointError
from raysgd.train import Checkpoint
from raysgd.train.checkpoint_manager import CheckpointManager
from tests import storing
from tests.files.damage import flipped, flips, lengths, tallied
from tests.files.function_cases import CONTENT, FOLDER_WAYS, LIST, files_of, is_content, make_source, read_folder
from tests.tiers import NIGHTLY

FLIPS = 2000 if NIGHTLY else 12


def damaged(data: bytes, count: int = FLIPS) -> dict[str, bytes]:
    changed = {f"bit {bit}": flipped(data, bit) for bit in flips(len(data) or 1, count) if data}
    return {**changed, **{f"cut to {length}": data[:length] for length in lengths(len(data))}, "longer": data + b"\n"}


# -- dictionaries -------------------------------------------------------------------------------------

WAYS: dict[str, Callable[[Path, bytes], Any]] = {
    "a file": lambda path, data: Checkpoint(path).to_dict(),
    "a trusted file": lambda path, data: Checkpoint(path, trusted=True).to_dict(),
    "bytes": lambda path, data: Checkpoint.from_bytes(data).to_dict(),
    "a file as bytes": lambda path, data: Checkpoint.from_bytes(Checkpoint(path).to_bytes()).to_dict(),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_damaged_dictionary_is_refused_or_loaded_as_saved(tmp_path: Path, way: str) -> None:
    path = Path(Checkpoint.from_dict(CONTENT).to_uri(tmp_path / "saved"))
    data = path.read_bytes()
    named = ["these bytes"] if way == "bytes" else ["saved"] if way != "a file as bytes" else []
    with tallied(f"dictionary, {way}") as tally:
        for what, found in damaged(data).items():
            path.write_bytes(found)
            tally.attempt(what, lambda found=found: WAYS[way](path, found), is_content, *named)  # type: ignore[misc]
    assert tally.rejected > 0.9 * tally.tried


# -- folders ------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_source(tmp_path / "source")


@pytest.mark.parametrize("way", FOLDER_WAYS)
def test_a_damaged_folder_is_refused_or_loaded_as_saved(source: Path, tmp_path: Path, way: str) -> None:
    path = Path(Checkpoint.from_directory(source).to_uri(tmp_path / "saved"))
    expected = files_of(source), {"model": "small", "numbers": list(range(30))}
    content = {file: file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}
    counter = iter(range(10**9))
    with tallied(f"folder, {way}") as tally:
        for file, data in content.items():
            for what, found in damaged(data, FLIPS // 4).items():
                file.write_bytes(found)
                load = lambda: FOLDER_WAYS[way](path, tmp_path / f"new{next(counter)}")  # noqa: E731
                tally.attempt(f"{file.name}: {what}", load, lambda got: got == expected, "saved")
            file.unlink()
            if file.name != LIST:  # a folder without a list is not verified
                tally.attempt(f"{file.name}: missing", load, lambda got: got == expected, "saved", "missing")
            file.write_bytes(data)
    assert load() == expected
    assert tally.rejected > 0.8 * tally.tried


def test_a_damaged_archive_is_refused_or_loaded_as_saved(source: Path) -> None:
    expected = files_of(source)

    def load(found: bytes) -> Any:
        with Checkpoint.from_bytes(found).as_directory() as folder:
            return files_of(folder)

    data = Checkpoint.from_directory(source).to_bytes()
    assert load(data) == expected
    with tallied("archive") as tally:
        for what, found in damaged(data).items():
            tally.attempt(what, lambda found=found: load(found), expected.__eq__)  # type: ignore[misc]


def test_added_files_are_ignored_and_changed_files_are_reported(source: Path, tmp_path: Path) -> None:
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
    writes = 0
    for allowed in range(4):

        def write(real: Any, *given: Any, allowed: int = allowed) -> Any:
            nonlocal writes
            writes += 1
            if writes > allowed:
                raise KeyboardInterrupt
            return real(*given)

        writes = 0
        with monkeypatch.context() as patch:
            storing.instead(patch, "write", write)
            try:
                stored.set_metadata({"try": allowed})
            except KeyboardInterrupt:
                assert allowed < 3
        assert read_folder(tmp_path / "saved")[1] in ({"try": allowed}, {"try": allowed - 1}, {**stored.get_metadata()})
    assert read_folder(tmp_path / "saved")[1] == {"try": 3}


def test_stored_checkpoints_of_a_run_have_checksums(
    source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = CheckpointManager(tmp_path / "run")
    for checkpoint in (Checkpoint.from_directory(source), Checkpoint.from_dict({"a": 1})):
        payload = checkpoint.to_bytes()
        manager.store(manager.register(payload), payload, {})
    first, second = (each.path for each in manager.stored)
    assert read_folder(first)[0] == files_of(source) and Checkpoint(second).to_dict() == {"a": 1}
    assert not caplog.messages, "no warnings"
    for path in (Path(str(first)) / "weights.bin", Path(str(second))):
        path.write_bytes(flipped(path.read_bytes(), 403))
    with pytest.raises(CheckpointError, match=r"checkpoint_000001: weights\.bin"):
        read_folder(first)
    with pytest.raises(CheckpointError, match=r"checkpoint_000002: the file is damaged.*delete"):
        CheckpointManager(tmp_path / "run").adopt({})


HOSTILE_LISTS = [
    b"[" * 200_000,
    b"[]",
    b'{"files": []}',
    b'{"files": {"a": -1}}',
    b'{"files": {"a": "1"}}',
    b'{"files": {"a": 1e9}}',
    b'{"files": {"../a": 1}}',
    b'{"files": {"/etc/passwd": 1}}',
    b'{"files": {"": 1}}',
    b'{"files": {"a//b": 1}}',
    b'{"files": {"a\\u0000": 1}}',
    b'{"files": {"\\ud800": 1}}',
    b'{"files": {"' + b"a/" * 50_000 + b'a": 1}}',
    b'{"files": {"a": ' + b"9" * 5000 + b"}}",
    b'{"files": {"weights.bin": 3072, "weights.bin/a": 1}}',
    b'{"files": {}, "version": 99, "digests": {}}',
    b"\xff\xfe",
]


@pytest.mark.parametrize("place", ["local", "remote"])
def test_a_hostile_list_is_refused(source: Path, place: str) -> None:
    where: Any = source
    if place == "remote":
        pytest.importorskip("fsspec")
        where = Checkpoint.from_directory(source).to_uri(f"memory://{uuid.uuid4().hex}/files")
    for listed in HOSTILE_LISTS:
        storing.write(f"{where}/{LIST}", listed)
        for load in (lambda: read_folder(where), lambda: Checkpoint(where).to_bytes()):
            with pytest.raises(CheckpointError) as caught:
                load()
            assert str(where) in str(caught.value), listed[:50]
