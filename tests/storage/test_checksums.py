"""The checksums in zip archives are verified, by several threads and in pieces."""

import hashlib
import io
import pickle
import random
import struct
import zipfile
from pathlib import Path

import pytest

from raysgd.errors import CheckpointError
from raysgd.storage import checksums

DATA = random.Random(1).randbytes(100_000)


def archive(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in members.items():
            file.writestr(name, content)
    return buffer.getvalue()


@pytest.mark.parametrize("package", ["zlib", "zlib_ng.zlib_ng"])
@pytest.mark.parametrize("as_file", [True, False])
@pytest.mark.parametrize("size", [0, 300, 301, len(DATA)])
def test_a_member_is_verified_in_pieces(
    size: int, as_file: bool, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checksums, "crc32", pytest.importorskip(package).crc32)
    monkeypatch.setattr(checksums, "PIECE", 300)
    monkeypatch.setattr(checksums, "ALONE", 2000)
    good = archive(a=b"first", large=DATA[:size], z=b"last")

    def verify(data: bytes) -> bool:
        (tmp_path / "file").write_bytes(data)
        with open(tmp_path / "file", "rb") as file:
            return checksums.verify(file if as_file else data)

    assert verify(good)
    begin = good.index(b"large") + 5
    for at in range(begin, begin + size, max(size // 20, 1)):
        with pytest.raises(CheckpointError, match="'large' in it does not have the checksum"):
            verify(good[:at] + bytes([good[at] ^ 16]) + good[at + 1 :])


def test_what_is_no_archive_has_no_checksums() -> None:
    assert not checksums.verify(pickle.dumps({"model": archive(a=b"1")}))
    assert not checksums.verify(b"")


def test_two_archives_in_one_file_are_refused() -> None:
    """Readers differ in which one they take."""
    with pytest.raises(CheckpointError, match="first part"):
        checksums.verify(archive(a=b"1") + archive(a=b"2"))


def test_a_member_larger_than_the_file_is_refused() -> None:
    data = bytearray(archive(a=b"1234"))
    place = data.rindex(b"PK\1\2") + 20
    data[place : place + 8] = struct.pack("<2L", 1 << 30, 1 << 30)
    with pytest.raises(CheckpointError, match="larger than the file"):
        checksums.verify(bytes(data))


def test_a_digest_is_that_of_the_content(tmp_path: Path) -> None:
    content = DATA * (3 * checksums.PIECE // len(DATA))
    (tmp_path / "file").write_bytes(content)
    with open(tmp_path / "file", "rb") as file:
        assert checksums.digest_of(file) == checksums.digest_of(content) == hashlib.sha256(content).hexdigest()
