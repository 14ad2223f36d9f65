"""Pack a checkpoint's folder into a tar archive, and unpack one without trusting anything in it. Both."""

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
    """Return the files in a folder, verified against the folder's list, as a tar archive that ends with its digest."""
    listed, names = read_list(folder), set[str]()
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for each in [
            Found(".", folder, is_dir=True),
            *walk(folder),
        ]:  # "." shows that even an empty folder is an archive
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
    return digest.sealed(stream.getbuffer())


@dataclass(frozen=True)
class _Member:
    name: str
    kind: bytes
    mode: int
    mtime: int
    start: int
    size: int


def unpack(data: Any, target: Path) -> None:
    """Write the files of an archive to `target`, an empty folder. Raise CheckpointError for anything but regular files
    and directories in that folder. Owners and setuid bits are not restored."""
    view = memoryview(data).cast("B")
    members = list(_members(view))  # checks all of them before the first one is written
    names = {member.name for member in members}
    if len(names) < len(members):
        raise CheckpointError("the archive of a checkpoint's files is damaged: it contains two files of the same name")
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
            f"the archive of a checkpoint's files is damaged: {error.filename} is both a file and a directory"
        ) from error


def _members(view: memoryview) -> Iterator[_Member]:
    """Yield the members of a tar archive. (`tarfile` hangs on some damaged archives, and trusts the sizes in them.)"""
    place = 0
    records: dict[str, str] | None = None  # of the PAX header before the next member, if it has one
    while True:
        block = bytes(view[place : place + BLOCK])
        if len(block) < BLOCK:
            _damaged("it is incomplete")
        if not any(block):
            return
        place += BLOCK
        if _number(block[148:156]) != sum(block) - sum(block[148:156]) + 8 * ord(" "):
            _damaged("a header does not have its checksum")
        kind, named = block[156:157], records or {}
        size = _number(named["size"].encode(), 10) if "size" in named else _number(block[124:136])
        if size > len(view) - place:
            _damaged(f"a member claims {size} bytes, and {len(view) - place} follow")
        if kind == tarfile.XHDTYPE:
            if size > HEADER_BYTES or records is not None:
                _damaged(f"a header claims {size} bytes, or follows another one")
            records = _records(bytes(view[place : place + size]))
        else:
            above = _text(block[345:500]) if block[257:263] == b"ustar\0" else ""  # GNU's format differs here
            name = named.get("path") or (f"{above}/" if above else "") + _text(block[:100])
            kind = tarfile.REGTYPE if kind == tarfile.AREGTYPE else kind
            name = _checked_name(name, kind)
            if name != ".":
                yield _Member(name, kind, _number(block[100:108]), _time(block), place, size)
            records = None
        place += -(-size // BLOCK) * BLOCK


def _checked_name(given: str, kind: bytes) -> str:
    name = PurePosixPath(given.removeprefix("./")).as_posix() if given else ""
    is_folder = kind == tarfile.DIRTYPE
    if not (is_folder or kind == tarfile.REGTYPE) or not (is_name(name) or (name == "." and is_folder)):
        raise CheckpointError(
            f"a checkpoint may contain only regular files and directories in its own folder, not {given!r:.300} "
            f"(of type {kind!r} in the archive)"
        )
    return name


def _records(data: bytes) -> dict[str, str]:
    """Return the values in a PAX header, which has lines of `length key=value`."""
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
        _damaged("a header has an invalid number")
    return int(digits, base)


def _time(block: bytes) -> int:
    digits = block[136:148].strip(b" \0")
    return int(digits, 8) if digits and not digits.strip(b"01234567") else 0


def _damaged(why: str) -> NoReturn:
    raise CheckpointError(f"the archive of a checkpoint's files is damaged: {why}")
