"""Build hostile archives of a checkpoint's files."""

import io
import tarfile
from typing import Any

from tests.files.damage import flipped
from tests.files.function_cases import LIST


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
    """Return a tar header that claims this size, with a correct checksum."""
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
