"""The files of a checkpoint's folder: which there are, and the list of them with sizes and digests.

The list, `.raysgd-folder.json`, is written last. What it lists must be there, and as it was; other files of the folder
are left alone. It detects damage; it is no signature. Links are followed to files of the same folder only, so that
nobody can be made to copy a file of somebody else's by a link to it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NoReturn

from raysgd.errors import CheckpointError
from raysgd.storage import digest

__all__ = [
    "MARKER",
    "Entry",
    "Found",
    "check_entry",
    "check_list",
    "check_size",
    "copy",
    "dump_json",
    "dump_list",
    "entry_of",
    "entry_of_bytes",
    "inside",
    "is_name",
    "json_digest",
    "list_of",
    "parse_json",
    "parse_list",
    "read_list",
    "read_plain",
    "refuse_file",
    "verify",
    "walk",
]

MARKER = ".raysgd-folder.json"
FORMAT, VERSION = "raysgd-folder", 2
OLDER_KEYS = {"format", "files"}
MOST_ENTRIES = 1_000_000
MOST_LIST_BYTES = 256 << 20
LONGEST_NAME, LONGEST_PART = 2048, 255


@dataclass(frozen=True)
class Entry:
    """A listed file. Older lists have no digests."""

    size: int
    digest: str | None


@dataclass(frozen=True)
class Found:
    """A file or directory below a folder: its name there, and where it really is."""

    name: str
    path: Path
    is_dir: bool


def refuse_file(path: Path, what: str) -> NoReturn:
    """Raise for what a checkpoint cannot hold."""
    raise CheckpointError(
        f"{path} is {what}: a checkpoint may hold plain files and directories, and links to those in the same folder. "
        "Put a copy of the file there instead"
    )


def walk(folder: Path, refuse: Callable[[Path, str], None] = refuse_file) -> Iterator[Found]:
    """Yield what lies below a folder, in order, directories before what is in them, without the list. Call `refuse` for
    links that lead out of the folder, or in circles, and for FIFOs, sockets and devices."""
    root = Path(os.path.realpath(folder))
    start = os.stat(root)
    pending: list[tuple[str, Path, tuple[tuple[int, int], ...]]] = [("", root, ((start.st_dev, start.st_ino),))]
    count = 0
    while pending:
        prefix, directory, above = pending.pop()
        inner: list[tuple[str, Path, tuple[tuple[int, int], ...]]] = []
        for each in sorted(os.scandir(directory), key=lambda each: each.name):
            if prefix + each.name == MARKER:
                continue
            count += 1
            if count > MOST_ENTRIES:
                raise CheckpointError(f"{folder} holds more than {MOST_ENTRIES} files and directories")
            shown = folder / (prefix + each.name)
            real = _target(root, each, shown, refuse)
            if real is None:
                continue
            found = os.stat(real)
            identity = (found.st_dev, found.st_ino)
            if stat.S_ISREG(found.st_mode):
                yield Found(prefix + each.name, real, is_dir=False)
            elif not stat.S_ISDIR(found.st_mode):
                refuse(shown, f"no file ({_kind(found.st_mode)})")
            elif identity in above:
                refuse(shown, "a link to a directory that it is in")
            else:
                yield Found(prefix + each.name, real, is_dir=True)
                inner.append((f"{prefix}{each.name}/", real, (*above, identity)))
        pending += reversed(inner)


def _target(root: Path, each: os.DirEntry[str], shown: Path, refuse: Callable[[Path, str], None]) -> Path | None:
    if not each.is_symlink():
        return Path(each.path)
    try:
        real = Path(os.path.realpath(each.path, strict=True))
    except OSError:
        refuse(shown, f"a link to {os.readlink(each.path)!r}, where nothing is")
        return None
    if not real.is_relative_to(root):
        refuse(shown, f"a link to {os.readlink(each.path)!r}, outside of the folder")
        return None
    return real


def _kind(mode: int) -> str:
    return "a FIFO" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"


def inside(folder: Path, name: str) -> Path:
    """Return where this file of a folder is; a link must not lead out of the folder."""
    path = folder / name
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(os.path.realpath(folder)):
        refuse_file(path, f"a link to {str(real)!r}, outside of the folder")
    return real


def _opened(path: Path) -> BinaryIO:
    """Open a plain file: no FIFO that was put in its place is waited for, and no link followed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | getattr(os, "O_NOFOLLOW", 0))
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        refuse_file(path, "no plain file")
    return file


def read_plain(path: Path) -> bytes:
    """Return the content of a plain file."""
    with _opened(path) as file:
        return file.read()


# -- the list -----------------------------------------------------------------------------------------


def dump_json(content: Mapping[str, Any]) -> bytes:
    """Return JSON that ends with the digest of the rest."""
    return json.dumps({**content, "digest": json_digest(content)}).encode()


def parse_json(data: bytes, where: Any) -> tuple[dict[str, Any], bool]:
    """Return what `dump_json` was given, and whether there was a digest. JSON without one is of an older version."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is damaged: it is not JSON as raysgd writes it ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{where} is damaged: it holds a {type(content).__name__}, not a dictionary")
    claimed = content.pop("digest", None)
    if claimed is not None and claimed != json_digest(content):
        raise CheckpointError(f"{where} is damaged: its content does not have the digest that was saved with it")
    return content, claimed is not None


def json_digest(content: Mapping[str, Any]) -> str:
    """Return a digest of what JSON says, however it is written."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def dump_list(entries: Mapping[str, Entry]) -> bytes:
    """Return the list as it is stored."""
    content = {"format": FORMAT, "version": VERSION, "files": {name: each.size for name, each in entries.items()}}
    return dump_json({**content, "digests": {name: each.digest for name, each in entries.items()}})


def parse_list(data: bytes, where: Any) -> dict[str, Entry]:
    """Return a stored list; a CheckpointError says what is wrong with another."""
    if len(data) > MOST_LIST_BYTES:
        raise CheckpointError(f"{where} is damaged: it has {len(data)} bytes, and a list has at most {MOST_LIST_BYTES}")
    content, sealed = parse_json(data, where)
    files, digests = content.get("files"), content.get("digests", {})
    known = sealed or content.keys() <= OLDER_KEYS
    if not (known and isinstance(files, dict) and isinstance(digests, dict)) or (sealed and {*files} != {*digests}):
        raise CheckpointError(f"{where} is damaged: it is no list of files with sizes and digests")
    if content.get("version", 1) not in range(VERSION + 1):
        raise CheckpointError(f"{where} was written by a newer raysgd (format version {content['version']})")
    for name, size in files.items():
        if not is_name(name):
            raise CheckpointError(f"{where}: a checkpoint must hold files of its own only, not {name!r}")
        if type(size) is not int or size < 0 or not (isinstance(digests.get(name), str) or not sealed):
            raise CheckpointError(f"{where} is damaged: {name!r} is listed with {size!r} bytes")
    return {name: Entry(size, digests.get(name)) for name, size in files.items()}


def is_name(name: str) -> bool:
    """Return whether this names something below a folder, and not the list."""
    path = PurePosixPath(name)
    try:
        sizes = [len(os.fsencode(part)) for part in path.parts]
    except UnicodeEncodeError:
        return False
    return (
        path.as_posix() == name
        and name not in ("", ".", MARKER)
        and not path.is_absolute()
        and ".." not in path.parts
        and "\0" not in name
        and sum(sizes) + len(sizes) <= LONGEST_NAME
        and max(sizes) <= LONGEST_PART
    )


def read_list(folder: Path) -> dict[str, Entry] | None:
    """Return the list of a folder on this machine; None where it has none."""
    path = folder / MARKER
    return parse_list(read_plain(path), path) if os.path.lexists(path) else None


def list_of(folder: Path) -> dict[str, Entry]:
    """Return a list of all files below a folder."""
    return {each.name: entry_of(each.path) for each in walk(folder) if not each.is_dir}


def entry_of(path: Path) -> Entry:
    """Return what the list says of this file."""
    with _opened(path) as file:
        return Entry(os.fstat(file.fileno()).st_size, digest.file_digest(file))


def entry_of_bytes(data: Any) -> Entry:
    """Return what the list says of a file with this content."""
    added = digest.Digest()
    added.update(data)
    return Entry(memoryview(data).nbytes, added.hexdigest())


def check_entry(where: Any, name: str, found: Entry, listed: Mapping[str, Entry] | None) -> None:
    """Raise if this file is listed as another one."""
    entry = (listed or {}).get(name)
    if entry is None:
        return
    check_size(where, name, found.size, listed or {})
    if entry.digest is not None and found.digest != entry.digest:
        _changed(where, name, "does not have the digest that was stored with it")


def check_size(where: Any, name: str, size: int, listed: Mapping[str, Entry]) -> None:
    """Raise if this file is listed with another size."""
    if name in listed and size != listed[name].size:
        _changed(where, name, f"has {size} bytes and was stored with {listed[name].size}")


def check_list(where: Any, names: Any, listed: Mapping[str, Entry] | None) -> None:
    """Raise if a listed file is missing."""
    for name in (listed or {}).keys() - set(names):
        _changed(where, name, "is missing")


def _changed(where: Any, name: str, how: str) -> NoReturn:
    raise CheckpointError(
        f"{where}: {name} {how}: it is damaged, or was changed after the checkpoint was stored. Use another copy, or an "
        f"older checkpoint. If you changed it on purpose, copy the folder without {MARKER}, and use "
        "Checkpoint.from_directory(copy)"
    )


def verify(folder: Path) -> None:
    """Raise if a file that the folder lists is missing or is not what it was. A folder without a list is its owner's."""
    listed = read_list(folder)
    if listed is None:
        return
    found = {each.name: each.path for each in walk(folder) if not each.is_dir}
    check_list(folder, found, listed)
    for name in listed:
        check_entry(folder, name, entry_of(found[name]), listed)


def copy(source: Path, target: Path) -> dict[str, Entry]:
    """Copy what lies below `source`, checked against its list, without that list; return one of the copies."""
    inside = Path(os.path.realpath(target))
    if inside.is_relative_to(os.path.realpath(source)):
        raise CheckpointError(f"a checkpoint cannot be copied into itself: {target} is in {source}")
    listed, copied = read_list(source), {}
    for each in walk(source):
        place = target / each.name
        if each.is_dir:
            place.mkdir(parents=True, exist_ok=True)
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(each.path, place)
        status = os.stat(each.path)
        os.chmod(place, status.st_mode & 0o777)  # without setuid and its like
        os.utime(place, ns=(status.st_atime_ns, status.st_mtime_ns))
        copied[each.name] = entry_of(place)
        check_entry(source, each.name, copied[each.name], listed)
    check_list(source, copied, listed)
    return copied
