"""A damaged checkpoint of a training function is loaded as it was saved, or refused with an error that names it and the cause."""

import json
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from raysgd import CheckpointError
from raysgd.train import Checkpoint
from raysgd.train.run.checkpoint_manager import CheckpointManager
from tests import storing
from tests.storage.damage import flipped, flips, lengths, tallied
from tests.storage.function_cases import CONTENT, LIST, files_of, make_source, read_folder, same
from tests.tiers import NIGHTLY


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_source(tmp_path / "source")


def test_a_damaged_archive_is_refused_or_loaded_as_saved(source: Path) -> None:
    """And a dictionary that is sent as bytes; checkpoints in files are in `test_every_place.py`."""

    def files(found: bytes) -> Any:
        with Checkpoint.from_bytes(found).as_directory() as folder:
            return files_of(folder)

    loads: dict[str, tuple[Checkpoint, Callable[[bytes], Any]]] = {
        "archive": (Checkpoint.from_directory(source), files),
        "dictionary": (Checkpoint.from_dict(CONTENT), lambda found: Checkpoint.from_bytes(found).to_dict()),
    }
    for name, (checkpoint, load) in loads.items():
        data = checkpoint.to_bytes()
        expected = load(data)
        damaged = [flipped(data, bit) for bit in flips(len(data), 2000 if NIGHTLY else 30)]
        damaged += [*(data[:length] for length in lengths(len(data))), data + b"x", data + data]
        with tallied(name) as tally:
            for number, found in enumerate(damaged):
                load_it, is_same = partial(load, found), partial(same, expected)
                tally.attempt(str(number), load_it, is_same, *["these bytes"] * (name == "dictionary"))
        assert tally.rejected > (0.6 if name == "dictionary" else 0.3) * tally.tried, "archives are padded"


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
    for path, text in ((Path(str(first)) / "weights.bin", b"abc"), (Path(str(second)), b"data.pkl")):
        data = path.read_bytes()
        path.write_bytes(flipped(data, 8 * data.index(text)))
    with pytest.raises(CheckpointError, match=r"checkpoint_000001: weights\.bin"):
        read_folder(first)
    with pytest.raises(CheckpointError, match=r"checkpoint_000002: the file is damaged.*delete"):
        CheckpointManager(tmp_path / "run").adopt({})


def listed(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda whole: {**whole, **changes}


def entry(name: str, **changes: Any) -> Callable[[dict[str, Any]], Any]:
    """Return what lists one more file, with the size and digest of another one."""
    return lambda whole: {**whole, "files": {**whole["files"], name: {**whole["files"]["weights.bin"], **changes}}}


# Each with its own digest, so that only what it says is wrong.
HOSTILE_LISTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    **{f"the file {name!r} elsewhere": entry(name) for name in ("../a", "/etc/passwd", "", ".", "a//b")},
    "a file below a file": entry("weights.bin/a"),
    **{f"a size of {size!r}": entry("weights.bin", size=size) for size in (-1, "1", 1e9, True, None)},
    "a number for a digest": entry("weights.bin", sha256=3),
    "numbers": lambda whole: {**whole, "files": {name: 3 for name in whole["files"]}},
    "no files": listed(files=None),
    "another format": listed(format="x"),
    "a newer version": listed(version=99),
}
# Names that no file can have.
HOSTILE_LISTS |= {f"a file named {name[:20]!r}": entry(name) for name in ("a\0", "\ud800", "a/" * 50_000 + "a")}
NO_LISTS = [b"", b"[" * 200_000, b"[]", b'{"files": {"a": ' + b"9" * 5000 + b"}}", b"\xff\xfe"]


@pytest.mark.parametrize("place", ["local", "remote"])
def test_a_hostile_list_is_refused(source: Path, tmp_path: Path, place: str) -> None:
    where = f"memory://{uuid.uuid4().hex}/files" if place == "remote" else str(tmp_path / "saved")
    if place == "remote":
        pytest.importorskip("fsspec")
    Checkpoint.from_directory(source).to_uri(where)
    whole = json.loads(storing.read(f"{where}/{LIST}"))
    del whole["digest"]
    wrong = {name: storing.sealed_json(change(whole)) for name, change in HOSTILE_LISTS.items()}
    for name, data in {**wrong, **{str(each[:20]): each for each in NO_LISTS}}.items():
        storing.write(f"{where}/{LIST}", data)
        for load in (lambda: read_folder(where), lambda: Checkpoint(where).to_bytes()):
            with pytest.raises(CheckpointError) as caught:
                load()
            assert where in str(caught.value), name
            assert ("only files in its own folder" in str(caught.value)) == (
                name.endswith("elsewhere") or name.startswith("a file named")
            ), caught.value
