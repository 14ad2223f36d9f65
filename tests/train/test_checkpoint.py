"""A checkpoint goes from one form into the other and comes back the same."""

import io
import tarfile
from pathlib import Path

import pytest

from raysgd.errors import CheckpointError, ConfigError
from raysgd.train import Checkpoint


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    (source / "weights.bin").write_bytes(b"123")
    return source


def test_dict_round_trip() -> None:
    checkpoint = Checkpoint.from_bytes(Checkpoint.from_dict({"epoch": 3}).to_bytes())
    assert checkpoint.to_dict() == {"epoch": 3}
    assert checkpoint.get_internal_representation() == ("data_dict", {"epoch": 3})
    assert checkpoint.path is None


def test_a_stored_dict_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint_000001"
    path.write_bytes(Checkpoint.from_dict({"epoch": 3}).to_bytes())
    assert Checkpoint(path).to_dict() == {"epoch": 3}
    assert Checkpoint(path).get_internal_representation() == ("local_path", str(path))


def test_directory_round_trip(directory: Path, tmp_path: Path) -> None:
    there = Checkpoint.from_bytes(Checkpoint.from_directory(directory).to_bytes())
    with there.as_directory() as path:
        assert (Path(path) / "weights.bin").read_bytes() == b"123"
    copied = there.to_directory(tmp_path / "copy")
    assert (Path(copied) / "weights.bin").read_bytes() == b"123"


def test_metadata_of_both_kinds_travel(directory: Path) -> None:
    for checkpoint in (Checkpoint.from_dict({"epoch": 1}), Checkpoint.from_directory(directory)):
        checkpoint.set_metadata({"model": "small"})
        checkpoint.update_metadata({"version": 2})
        arrived = Checkpoint.from_bytes(checkpoint.to_bytes())
        assert arrived.get_metadata() == {"model": "small", "version": 2}


def test_metadata_must_be_plain() -> None:
    with pytest.raises(TypeError, match="JSON"):
        Checkpoint.from_dict({}).set_metadata({"model": object()})


def test_the_wrong_question_says_the_right_one(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="as_directory"):
        Checkpoint.from_directory(directory).to_dict()
    with pytest.raises(CheckpointError, match="to_dict"):
        Checkpoint.from_dict({}).to_directory()
    with pytest.raises(CheckpointError, match="no directory"):
        Checkpoint.from_directory(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        Checkpoint(tmp_path / "absent").to_dict()
    with pytest.raises(ConfigError, match="takes a dict"):
        Checkpoint.from_dict([1])  # type: ignore[arg-type]


def test_an_archive_that_points_outside_is_refused() -> None:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        entry = tarfile.TarInfo("../outside")
        entry.size = 1
        archive.addfile(entry, io.BytesIO(b"x"))
    with pytest.raises(CheckpointError, match=r"\.\./outside"):
        Checkpoint.from_bytes(stream.getvalue())


def test_foreign_bytes_are_refused() -> None:
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        Checkpoint.from_bytes(b"hello")
