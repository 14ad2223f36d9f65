"""The digest at the end of a file: found, checked, and no obstacle for other readers."""

import io
import os
import pickle
import random
import zipfile
from pathlib import Path

import pytest

from raysgd.errors import CheckpointError
from raysgd.storage import digest


def archive(content: bytes = b"content") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("name", content)
    return buffer.getvalue()


def test_a_sealed_archive_and_a_sealed_pickle_are_read_by_those_who_know_nothing_of_it() -> None:
    assert zipfile.ZipFile(io.BytesIO(digest.sealed(archive()))).read("name") == b"content"
    assert pickle.loads(digest.sealed(pickle.dumps({"a": 1}))) == {"a": 1}


@pytest.mark.parametrize("data", [archive(), pickle.dumps(list(range(100))), b""], ids=["zip", "pickle", "empty"])
def test_every_changed_bit_and_every_missing_byte_is_noticed(data: bytes) -> None:
    whole = digest.sealed(data)
    assert digest.verify(whole)
    for place in range(len(whole) - digest.SEAL_BYTES):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            with pytest.raises(CheckpointError, match="damaged"):
                digest.verify(damaged)
    for length in range(len(whole)):
        if data[:2] == b"PK" and length >= len(whole) - digest.SEAL_BYTES:  # the archive says that something is missing
            with pytest.raises(CheckpointError, match="damaged"):
                digest.verify(whole[:length])
        elif length != len(whole) - digest.SEAL_BYTES - 1:  # half of that number; no reader takes it for an archive
            assert not digest.verify(whole[:length])


def test_an_older_pickle_that_holds_an_archive_is_no_damaged_archive(tmp_path: Path) -> None:
    old = pickle.dumps({"model": archive(), "more": digest.sealed(archive()), "epoch": 3})
    assert not digest.verify(old)
    (tmp_path / "old").write_bytes(old)
    with open(tmp_path / "old", "rb") as file:
        assert not digest.verify(file)
    assert digest.verify(digest.sealed(old))


@pytest.mark.parametrize("size", [0, 1, digest.CHUNK - 1, digest.CHUNK, 3 * digest.CHUNK + 5, digest.PIECE * 2 + 3])
def test_the_digest_is_the_same_whatever_pieces_the_bytes_come_in(size: int, tmp_path: Path) -> None:
    data = random.Random(size).randbytes(size)
    cut = digest.Digest()
    left, lengths = memoryview(data), random.Random(1)
    while left:
        length = lengths.randrange(1, digest.CHUNK)
        cut.update(left[:length])
        left = left[length:]
    (tmp_path / "file").write_bytes(data)
    with open(tmp_path / "file", "rb") as file:
        assert cut.hexdigest() == digest.digest_of(file)


@pytest.mark.parametrize("size", [0, 5, digest.CHUNK, digest.PIECE + 7])
def test_a_writer_seals_as_it_writes(size: int, tmp_path: Path) -> None:
    data = archive(os.urandom(size))
    with open(tmp_path / "file", "wb", buffering=0) as raw:
        writer = digest.SealingWriter(raw)
        with io.BufferedWriter(writer, 1 << 16) as file:
            for start in range(0, len(data), 100_001):
                file.write(data[start : start + 100_001])
            file.flush()
            writer.seal()
    assert (tmp_path / "file").read_bytes() == digest.sealed(data)
    with open(tmp_path / "file", "rb") as file:
        assert digest.is_sealed(file) and digest.verify(file)


def test_only_what_ends_as_an_archive_without_a_comment_can_be_sealed() -> None:
    with pytest.raises(ValueError, match="without a comment"):
        digest.sealed(digest.sealed(archive()))
    with pytest.raises(ValueError, match="without a comment"):
        digest.SealingWriter(io.BytesIO()).seal()
