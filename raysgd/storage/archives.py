"""The tar archive in which a checkpoint's folder travels. It is read without trusting anything in it."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from raysgd.errors import CheckpointError
from raysgd.storage import digest
from raysgd.storage.folders import Found, check_entry, check_list, entry_of_bytes, is_name, read_list, read_plain, walk

__all__ = ["pack", "unpack"]

BLOCK = 512
HEADER_BYTES = 1 << 20  # of names that do not fit into the block


def pack(folder: Path) -> bytes:
    """Return what lies below a folder as a tar archive with a digest behind its end; checked against the folder's list."""
    listed, names = read_list(folder), set[str]()
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for each in [Found(".", folder, is_dir=True), *walk(folder)]:  # an archive of nothing could not be told apart
            member = tarfile.TarInfo(each.name)
            status = os.stat(each.path)
            member.mode, member.mtime = status.st_mode & 0o777, max(int(status.st_mtime), 0)
            if each.is_dir:
                member.type = tarfile.DIRTYPE
                archive.addfile(member)
                continue
            content = read_plain(each.path)
            if listed is not None:
                check_entry(folder, each.name, entry_of_bytes(content), listed)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
            names.add(each.name)
    check_list(folder, names, listed)
    digest.seal_buffer(stream)
    return stream.getvalue()


@dataclass(frozen=True)
class _Member:
    name: str
    kind: bytes
    mode: int
    mtime: int
    start: int
    size: int


def unpack(data: Any, target: Path) -> None:
    """Write the files of an archive below `target`, an empty folder. Nothing but plain files and directories of that folder
    is accepted, and no owner, no setuid bit and no link is taken from the archive."""
    view = memoryview(data).cast("B")
    members = list(_members(view))  # all of them are checked before the first is written
    names = {member.name for member in members}
    if len(names) < len(members):
        raise CheckpointError("the archive of a checkpoint's files is damaged: it holds two files of one name")
    try:
        for member in members:
            place = target / member.name
            if member.kind == tarfile.DIRTYPE:
                place.mkdir(parents=True, exist_ok=True)
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            with open(place, "xb") as file:
                file.write(view[member.start : member.start + member.size])
                if member.mode & 0o100:
                    os.fchmod(file.fileno(), os.fstat(file.fileno()).st_mode | 0o100)
            os.utime(place, (member.mtime, member.mtime))
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise CheckpointError(
            f"the archive of a checkpoint's files is damaged: one name is a file and a directory ({error.filename})"
        ) from error


def _members(view: memoryview) -> Iterator[_Member]:
    """Yield what a tar archive holds. tarfile itself waits for ever on some damaged ones, and believes their sizes."""
    place = 0
    records: dict[str, str] | None = None  # of the header that comes before a member's own, where there is one
    while True:
        block = bytes(view[place : place + BLOCK])
        if len(block) < BLOCK:
            _damaged("it ends in the middle")
        if not any(block):
            return
        place += BLOCK
        if _number(block[148:156]) != sum(block) - sum(block[148:156]) + 8 * ord(" "):
            _damaged("a header does not have its checksum")
        kind, said = block[156:157], records or {}
        size = _number(said["size"].encode(), 10) if "size" in said else _number(block[124:136])
        if size > len(view) - place:
            _damaged(f"a member claims {size} bytes, and {len(view) - place} follow")
        if kind == tarfile.XHDTYPE:
            if size > HEADER_BYTES or records is not None:
                _damaged(f"a header claims {size} bytes, or follows another one")
            records = _records(bytes(view[place : place + size]))
        else:
            above = _text(block[345:500]) if block[257:263] == b"ustar\0" else ""  # GNU's has other things there
            name = said.get("path") or (f"{above}/" if above else "") + _text(block[:100])
            kind = tarfile.REGTYPE if kind == tarfile.AREGTYPE else kind
            name = _checked_name(name, kind)
            if name != ".":  # of the folder itself there is nothing to be done
                yield _Member(name, kind, _number(block[100:108]), _time(block), place, size)
            records = None
        place += -(-size // BLOCK) * BLOCK


def _checked_name(given: str, kind: bytes) -> str:
    if kind not in (tarfile.REGTYPE, tarfile.DIRTYPE):
        raise CheckpointError(
            f"a checkpoint must hold plain files and directories only, not {given!r:.300}, which is a link, a device or "
            "the like"
        )
    name = PurePosixPath(given.removeprefix("./")).as_posix() if given else ""
    if not (is_name(name) or (name == "." and kind == tarfile.DIRTYPE)):
        raise CheckpointError(f"a checkpoint must hold plain files and directories only, not {given!r:.300}")
    return name


def _records(data: bytes) -> dict[str, str]:
    """Return what a PAX header says: lines of `length key=value`."""
    found = {}
    while data:
        digits, _, _ = data.partition(b" ")
        length = _number(digits, 10) if len(digits) < 12 else 0
        key, equals, value = data[len(digits) + 1 : length - 1].partition(b"=")
        if length > len(data) or data[length - 1 : length] != b"\n" or not equals or key.startswith(b"GNU.sparse"):
            _damaged("a header cannot be read")
        found[_text(key)] = value.decode("utf-8", "surrogateescape")
        data = data[length:]
    return found


def _text(data: bytes) -> str:
    return data.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _number(field: bytes, base: int = 8) -> int:
    digits = field.strip(b" \0")
    if not digits.isdigit() or len(digits) > 20 or (base == 8 and digits.strip(b"01234567")):
        _damaged("a header holds no number where one belongs")
    return int(digits, base)


def _time(block: bytes) -> int:
    digits = block[136:148].strip(b" \0")
    return int(digits, 8) if digits and not digits.strip(b"01234567") else 0


def _damaged(why: str) -> NoReturn:
    raise CheckpointError(f"the archive of a checkpoint's files is damaged: {why}")
