"""Reading checkpoints from a file, by each process that sees the same file."""

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raysgd import CheckpointError
from raysgd.storage.seen import TAIL, SeenFile, UnseenError, kept_open, verified_file

DATA = random.Random(5).randbytes(5_000)


def seen_at(path: Path) -> SeenFile:
    with open(path, "rb") as file:
        return SeenFile.of(file, path)


def sees(file: SeenFile) -> bool:
    try:
        with file.opened() as content:
            return content.tell() == 0
    except UnseenError:
        return False


def test_a_file_is_identified_by_more_than_its_name(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(DATA)
    seen = seen_at(path)
    assert sees(seen) and Path(seen.path).is_absolute()
    assert not sees(replace(seen, path=str(tmp_path / "other.pt")))
    changed_ns = path.stat().st_mtime_ns
    path.write_bytes(DATA[::-1])
    os.utime(path, ns=(changed_ns, changed_ns))
    assert not sees(seen), "same size, same time, another content"
    path.write_bytes(DATA)
    os.utime(path, ns=(changed_ns, changed_ns))
    assert sees(seen)
    os.utime(path, ns=(changed_ns, changed_ns + 1))
    assert not sees(seen)
    path.unlink()
    assert not sees(seen)


def test_a_change_in_a_large_file_is_noticed_by_its_end(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(TAIL)}, tmp_path / "a.pt")
    seen = seen_at(tmp_path / "a.pt")
    changed = torch.zeros(TAIL)
    changed[0] = 1  # far from the end, where its checksum is
    torch.save({"a": changed}, tmp_path / "a.pt")
    os.utime(tmp_path / "a.pt", ns=(seen.changed_ns, seen.changed_ns))
    assert (tmp_path / "a.pt").stat().st_size == seen.size > 4 * TAIL
    assert not sees(seen)


@pytest.mark.parametrize(
    ("name", "archive", "expected"), [("a", True, True), ("a", False, False), ("a.safetensors", True, False)]
)
def test_workers_read_only_archives_themselves(tmp_path: Path, name: str, archive: bool, expected: bool) -> None:
    content = {"models": [], "optimizers": []}
    torch.save(content, tmp_path / name, _use_new_zipfile_serialization=archive)
    file, has_checksums = verified_file(kept_open(tmp_path / name), tmp_path / name)
    assert (file is not None) is expected and has_checksums is archive


def test_a_file_that_is_not_there_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        kept_open(tmp_path / "a")


def test_a_file_can_be_read_while_it_is_kept_open(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"before")
    file = kept_open(path)
    descriptor = file.fileno()
    path.unlink()
    path.write_bytes(b"after")
    assert file.read() == b"before"
    del file
    with pytest.raises(OSError):
        os.fstat(descriptor)
