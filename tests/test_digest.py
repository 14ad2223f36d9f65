"""The digest at the end of a file is found and verified, and does not disturb other readers."""

import hashlib
import io
import os
import pickle
import random
import zipfile
import zlib
from pathlib import Path

import pytest

from raysgd.errors import CheckpointError
from raysgd.storage import digest


def archive(content: bytes = b"content") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("name", content)
    return buffer.getvalue()


def test_programs_that_do_not_know_the_digest_can_read_the_file() -> None:
    assert zipfile.ZipFile(io.BytesIO(digest.sealed(archive()))).read("name") == b"content"
    assert pickle.loads(digest.sealed(pickle.dumps({"a": 1}))) == {"a": 1}


@pytest.mark.parametrize("data", [archive(), pickle.dumps(list(range(100))), b""], ids=["zip", "pickle", "empty"])
def test_every_changed_bit_and_every_missing_byte_is_detected(data: bytes) -> None:
    complete = digest.sealed(data)
    assert digest.verify(complete)
    for place in range(len(complete) - digest.SEAL_BYTES):
        for bit in range(8):
            damaged = bytearray(complete)
            damaged[place] ^= 1 << bit
            with pytest.raises(CheckpointError, match="damaged"):
                digest.verify(damaged)
    for length in range(len(complete)):
        if data[:2] == b"PK" and length >= len(complete) - digest.SEAL_BYTES:  # the archive is visibly incomplete
            with pytest.raises(CheckpointError, match="damaged"):
                digest.verify(complete[:length])
        elif length != len(complete) - digest.SEAL_BYTES - 1:  # not a readable archive either
            assert not digest.verify(complete[:length])


def test_an_older_pickle_that_contains_an_archive_is_not_a_damaged_archive(tmp_path: Path) -> None:
    old = pickle.dumps({"model": archive(), "more": digest.sealed(archive()), "epoch": 3})
    assert not digest.verify(old)
    (tmp_path / "old").write_bytes(old)
    with open(tmp_path / "old", "rb") as file:
        assert not digest.verify(file)
    assert digest.verify(digest.sealed(old))


@pytest.mark.parametrize(
    "size",
    [
        0,
        1,
        digest.CRC32_CHUNKS.size - 1,
        digest.CRC32_CHUNKS.size,
        3 * digest.CRC32_CHUNKS.size + 5,
        digest.PIECE * 2 + 3,
    ],
)
def test_the_digest_does_not_depend_on_the_sizes_of_the_pieces(size: int, tmp_path: Path) -> None:
    data = random.Random(size).randbytes(size)
    left, lengths = memoryview(data), random.Random(1)
    with open(tmp_path / "file", "wb", buffering=0) as raw, digest.HashingWriter(raw) as cut:
        while left:
            left = left[cut.write(left[: lengths.randrange(1, digest.CRC32_CHUNKS.size)]) :]
        found = cut.hexdigest()
    assert (tmp_path / "file").read_bytes() == data
    assert digest.sealed(data)[-digest.SEAL_BYTES :] == digest.CRC32_MAGIC + found.encode() + b"\n"


def test_the_digest_is_of_the_checksums_that_zip_uses() -> None:
    data = random.Random(2).randbytes(digest.CRC32_CHUNKS.size + 10)
    checksums = [zlib.crc32(data[: digest.CRC32_CHUNKS.size]), zlib.crc32(data[digest.CRC32_CHUNKS.size :])]
    expected = hashlib.sha256(b"".join(each.to_bytes(4, "little") for each in checksums)).hexdigest()
    assert digest.sealed(data) == data + b"\nraysgd-crc-32-1 " + expected.encode() + b"\n"


def test_exchanged_chunks_are_detected() -> None:
    chunks = [random.Random(seed).randbytes(digest.CRC32_CHUNKS.size) for seed in (1, 2)]
    complete = digest.sealed(b"".join(chunks))
    with pytest.raises(CheckpointError, match="damaged"):
        digest.verify(chunks[1] + chunks[0] + complete[-digest.SEAL_BYTES :])


def test_files_that_end_with_the_older_digest_are_verified(tmp_path: Path) -> None:
    for data in (archive(os.urandom(digest.SHA256_CHUNKS.size)), pickle.dumps([1, 2])):
        if data[:2] == b"PK":
            data = data[:-2] + digest.SEAL_BYTES.to_bytes(2, "little")
        complete = data + digest.SHA256_MAGIC + digest.digest_of(data).encode() + b"\n"
        (tmp_path / "file").write_bytes(complete)
        with open(tmp_path / "file", "rb") as file:
            assert digest.is_sealed(file) and digest.verify(file)
        damaged = bytearray(complete)
        damaged[len(data) // 2] ^= 4
        with pytest.raises(CheckpointError, match="damaged"):
            digest.verify(damaged)


@pytest.mark.parametrize("size", [0, 5, digest.CRC32_CHUNKS.size, digest.PIECE + 7])
def test_a_sealing_writer_writes_what_sealed_returns(size: int, tmp_path: Path) -> None:
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


def test_only_an_archive_without_a_comment_can_be_sealed() -> None:
    with pytest.raises(ValueError, match="without a comment"):
        digest.sealed(digest.sealed(archive()))
    with pytest.raises(ValueError, match="without a comment"):
        digest.SealingWriter(io.BytesIO()).seal()
