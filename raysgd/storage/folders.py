"""List the files of a checkpoint's folder with their sizes and digests, and verify a folder against
its list. Both.

The list, `.raysgd-folder.json`, is written last. The files that it lists must exist and be
unchanged; other files in the folder are ignored. The list detects damage, but it is not a
signature. Links are refused, so that a link cannot make a user copy another user's file."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import stat
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NoReturn

from raysgd.errors import CheckpointError
from raysgd.storage.checksums import digest_of

MARKER = ".raysgd-folder.json"
LONGEST, LONGEST_PART = 3000, 255  # bytes of a name, within the limits of Linux for a path and for a part of it
FORMAT, VERSION = "raysgd-folder", 1


@dataclass(frozen=True)
class FileEntry:
    """A listed file. At a URI, `at` is the object that has its content, if this has another name:
    an object of its name belongs to the folder that was replaced."""

    size: int
    digest: str
    at: str = ""


@dataclass(frozen=True)
class Found:
    """A file or directory in a folder: its name relative to the folder, and its path."""

    name: str
    path: Path
    is_dir: bool


def refuse_file(path: Path, what: str) -> NoReturn:
    """Raise the error for something that a checkpoint cannot contain."""
    raise CheckpointError(
        f"{path} is {what}: a checkpoint may contain only regular files and directories. Put a copy of the file there instead"
    )


def walk(folder: Path, refuse: Callable[[Path, str], None] = refuse_file, prefix: str = "") -> Iterator[Found]:
    """Yield the files and directories in a folder, in order, each directory before its content, but
    not the list. Call `refuse` for links, FIFOs, sockets and devices."""
    for each in sorted(os.scandir(folder / prefix), key=lambda each: each.name):
        name, path = prefix + each.name, Path(each.path)
        if name == MARKER:
            continue
        if each.is_symlink():
            refuse(path, f"a link to {os.readlink(path)!r}")
        elif each.is_dir():
            yield Found(name, path, is_dir=True)
            yield from walk(folder, refuse, f"{name}/")
        elif each.is_file():
            yield Found(name, path, is_dir=False)
        else:
            refuse(path, "a FIFO, a socket or a device")


def inside(folder: Path, name: str) -> Path:
    """Find the path of this file of a folder. Raise CheckpointError if it is a link."""
    path = folder / name
    if path.is_symlink():
        refuse_file(path, f"a link to {os.readlink(path)!r}")
    return path


def _opened(path: Path) -> BinaryIO:
    """Open a regular file. A link or a FIFO in its place is an error, and not waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    file = os.fdopen(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        refuse_file(path, "not a regular file")
    return file


def read_plain(path: Path) -> bytes:
    with _opened(path) as file:
        return file.read()


# -- the list -----------------------------------------------------------------------------------------


def dump_json(content: Mapping[str, Any]) -> bytes:
    """Convert this content to JSON, with a digest of it."""
    return json.dumps({**content, "digest": json_digest(content)}).encode()


def parse_json(data: bytes, where: Any) -> dict[str, Any]:
    """Read the content that `dump_json` wrote. Raise CheckpointError if it is damaged."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is damaged: it is not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{where} is damaged: it contains a {type(content).__name__}, not a dictionary")
    if content.pop("digest", None) != json_digest(content):
        raise CheckpointError(f"{where} is damaged: its content does not have the digest that was saved with it")
    return content


def json_digest(content: Mapping[str, Any]) -> str:
    """Compute a digest of the content, which does not depend on how the JSON is formatted."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def dump_list(entries: Mapping[str, FileEntry]) -> bytes:
    files = {
        name: {"size": each.size, "sha256": each.digest, **({"at": each.at} if each.at else {})}
        for name, each in entries.items()
    }
    return dump_json({"format": FORMAT, "version": VERSION, "files": files})


def parse_list(data: bytes, where: Any) -> dict[str, FileEntry]:
    """Read the entries of a stored list. Raise CheckpointError if it is damaged."""
    content = parse_json(data, where)
    version = content.get("version")
    if type(version) is int and version > VERSION:
        raise CheckpointError(f"{where} was written by a newer raysgd (format version {version})")
    files = content.get("files")
    if content.get("format") != FORMAT or not isinstance(files, dict):
        raise CheckpointError(f"{where} is damaged: it is not a list of files with sizes and digests")
    entries = {}
    for name, each in files.items():
        if not is_name(name):
            raise CheckpointError(f"{where}: a checkpoint may contain only files in its own folder, not {name!r}")
        size, sha256, at = (each.get(key) for key in ("size", "sha256", "at")) if isinstance(each, dict) else [None] * 3
        if (
            type(size) is not int
            or not isinstance(sha256, str)
            or not (at is None or (isinstance(at, str) and is_name(at)))
        ):
            raise CheckpointError(f"{where} is damaged: {name!r} is listed with {each!r:.60}")
        entries[name] = FileEntry(size, sha256, at or "")
    return entries


def is_name(name: str) -> bool:
    """Whether this can be the name of a file in a folder, other than the list."""
    path, encoded = PurePosixPath(name), name.encode(errors="replace")
    if (
        "\0" in name
        or encoded.decode() != name
        or len(encoded) > LONGEST
        or max(map(len, encoded.split(b"/"))) > LONGEST_PART
    ):
        return False
    return (
        path.as_posix() == name and name not in ("", ".", MARKER) and not path.is_absolute() and ".." not in path.parts
    )


def read_list(folder: Path) -> dict[str, FileEntry] | None:
    """Read the entries of a local folder's list; None if it has no list."""
    path = folder / MARKER
    return parse_list(read_plain(path), path) if os.path.lexists(path) else None


def list_of(folder: Path) -> dict[str, FileEntry]:
    return {each.name: entry_of(each.path) for each in walk(folder) if not each.is_dir}


def entry_of(path: Path) -> FileEntry:
    with _opened(path) as file:
        return FileEntry(os.fstat(file.fileno()).st_size, digest_of(file))


def entry_of_bytes(data: Any) -> FileEntry:
    return FileEntry(memoryview(data).nbytes, digest_of(data))


def check_entry(where: Any, name: str, file: FileEntry, listed: Mapping[str, FileEntry] | None) -> None:
    """Raise CheckpointError if the list has another entry for this file."""
    entry = (listed or {}).get(name)
    if entry is not None:
        check_size(where, name, file.size, {name: entry})
        if file.digest != entry.digest:
            _changed(where, name, "does not have the digest that was stored with it")


def check_size(where: Any, name: str, size: int, listed: Mapping[str, FileEntry]) -> None:
    if name in listed and size != listed[name].size:
        _changed(where, name, f"has {size} bytes and was stored with {listed[name].size}")


def check_list(where: Any, names: Any, listed: Mapping[str, FileEntry] | None) -> None:
    for name in (listed or {}).keys() - set(names):
        _changed(where, name, "is missing")


def _changed(where: Any, name: str, how: str) -> NoReturn:
    raise CheckpointError(
        f"{where}: {name} {how}: the file is damaged, or was changed after the checkpoint was stored. Use another copy, or "
        f"an older checkpoint. If you changed it on purpose, copy the folder without {MARKER}, and use "
        "Checkpoint.from_directory(copy)"
    )


def verify(folder: Path) -> None:
    """Raise CheckpointError if a listed file is missing or changed. No list: it passes."""
    listed = read_list(folder)
    if listed is not None:
        files = {each.name: each.path for each in walk(folder) if not each.is_dir}
        check_list(folder, files, listed)
        for name in listed:
            check_entry(folder, name, entry_of(files[name]), listed)


def copy(source: Path, target: Path) -> dict[str, FileEntry]:
    """Copy the files of `source`, verified against its list. Return the copies' entries."""
    if Path(os.path.realpath(target)).is_relative_to(os.path.realpath(source)):
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
        os.chmod(place, status.st_mode & 0o777)  # without setuid, setgid and the sticky bit
        os.utime(place, ns=(status.st_atime_ns, status.st_mtime_ns))
        copied[each.name] = entry_of(place)
        check_entry(source, each.name, copied[each.name], listed)
    check_list(source, copied, listed)
    return copied


# -- tar archives -------------------------------------------------------------------------------------


def pack(folder: Path, added: Mapping[str, bytes] = {}) -> bytes:
    """Pack the verified files of a folder, and the `added` ones, as a tar archive that ends with
    their list."""
    listed, entries, stream = read_list(folder), dict[str, FileEntry](), io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        # "." shows that even an empty folder is an archive.
        for each in [Found(".", folder, is_dir=True), *walk(folder)]:
            member, status = tarfile.TarInfo(each.name), os.stat(each.path)
            member.mode, member.mtime = status.st_mode & 0o777, max(int(status.st_mtime), 0)
            if each.is_dir:
                member.type = tarfile.DIRTYPE
                archive.addfile(member)
                continue
            content = read_plain(each.path)
            entries[each.name] = entry_of_bytes(content)
            check_entry(folder, each.name, entries[each.name], listed)
            if each.name not in added:
                _add(archive, member, content)
        for name, content in added.items():
            entries[name] = entry_of_bytes(content)
            _add(archive, tarfile.TarInfo(name), content)
        check_list(folder, entries, listed)
        _add(archive, tarfile.TarInfo(MARKER), dump_list(entries))
    return stream.getvalue()


def member_of(data: bytes, name: str) -> bytes | None:
    """Read one file of an archive that `pack` has made, or None if it has no file of this name."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        member = archive.extractfile(name) if name in archive.getnames() else None
        return None if member is None else member.read()


def _add(archive: tarfile.TarFile, member: tarfile.TarInfo, content: bytes) -> None:
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def unpack(data: bytes, target: Path) -> None:
    """Write the files of an archive to `target`, an empty folder, and verify them against the
    archive's list. Raise CheckpointError for links, devices and names outside of that folder.
    Owners and setuid bits are not restored."""
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for member in archive:
                if not (member.isreg() or member.isdir()):
                    raise tarfile.TarError(f"{member.name!r:.300} is a link or a device")
                archive.extract(member, target, filter="data")
    except (tarfile.TarError, OSError, ValueError) as error:
        raise CheckpointError(
            "a checkpoint's archive may contain only regular files and directories in its own folder, and this one is damaged or "
            f"contains something else ({error})"
        ) from error
    if read_list(target) is None:
        raise CheckpointError("these bytes are damaged: the list at the end of the archive is missing")
    verify(target)
    (target / MARKER).unlink()  # the user may change these files
