"""Read and write objects in remote storage through fsspec: each is complete or absent. Both.

fsspec and the package for a store (s3fs for `s3://`) are imported when a URI is first used. They
read keys and endpoints from fsspec's configuration files, from `FSSPEC_*`, and from where the
store's own tools find them (`AWS_*`).
"""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from raysgd.errors import CheckpointError, ConfigError, described
from raysgd.storage import folders
from raysgd.storage.folders import MARKER, FileEntry
from raysgd.storage.masking import mask, split_query

SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::[A-Za-z][A-Za-z0-9+.-]*)*://")
STALLED_S = 600.0

# In these stores, a new object appears completely or not at all. In others (sftp, hdfs, smb, ...), it is written under
# a temporary name and renamed.
ATOMIC = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci", "memory"}


@dataclass(frozen=True, repr=False)
class Uri:
    """A place in remote storage, with methods named as in `pathlib`.

    `text` is the URI as it was passed. `str()`, and so every message, shows `***` for passwords,
    tokens and signatures.
    """

    text: str

    @staticmethod
    def is_one(text: str) -> bool:
        return SCHEME.match(text) is not None

    @property
    def name(self) -> str:
        folder, _, last = self._split()[1].rpartition("/")
        return last if folder else last.rpartition("@")[2]  # of a host or bucket without its user

    @property
    def parent(self) -> Uri:
        head, path = self._split()
        return Uri(head + path.rpartition("/")[0] + split_query(self.text)[1])

    def __truediv__(self, name: str) -> Uri:
        place, query = split_query(self.text)
        return Uri(f"{place.rstrip('/')}/{name}{query}")

    def __str__(self) -> str:
        return mask(self.text)

    def __repr__(self) -> str:
        return f"Uri({str(self)!r})"

    def exists(self) -> bool:
        """Whether there is a complete object or a complete folder."""
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        with _asked(self) as (system, path):
            return _kind(system, path) == "file"

    def is_dir(self) -> bool:
        """Whether there is a complete folder: one with its list, which is written last."""
        return (self / MARKER).is_file()

    def read_bytes(self) -> bytes:
        with _asked(self) as (system, path):
            return bytes(system.cat_file(path))

    def _split(self) -> tuple[str, str]:
        place, _ = split_query(self.text)
        head = SCHEME.match(place)
        assert head is not None
        return head.group(), place[head.end() :].rstrip("/")


# -- single objects -----------------------------------------------------------------------------------


def write(uri: Uri, data: Any) -> None:
    """Write an object, completely or not at all. An older object of that name stays until then."""
    _put(uri, lambda system, path, callback: system.pipe_file(path, bytes(data)))


def upload(uri: Uri, file: Path) -> None:
    """Write an object from a local file, without reading the file into memory."""
    _put(uri, lambda system, path, callback: system.put_file(str(file), path, callback=callback))


def _put(uri: Uri, put: Callable[[Any, str, Any], None]) -> None:
    def send(system: Any, path: str) -> None:
        _limited(uri, lambda callback: put(system, path, callback))

    with _asked(uri, "written") as (system, path):
        if _protocols(system) & ATOMIC:
            send(system, path)
            return
        draft = f"{path}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            system.makedirs(path.rpartition("/")[0], exist_ok=True)
            send(system, draft)
            system.mv(draft, path)
        except BaseException:
            if _kind(system, draft):
                system.rm_file(draft)
            raise


def _limited(uri: Uri, work: Callable[[Any], None]) -> None:
    """Run `work(callback)` on a thread, where fsspec reports progress to `callback`. Raise
    CheckpointError if it neither ends nor makes progress for STALLED_S, because the stores' own
    time limits are unknown, and some have none."""
    from fsspec.callbacks import Callback

    class LastProgress(Callback):  # type: ignore[misc]
        at = time.monotonic()

        def call(self, *args: Any, **kwargs: Any) -> None:
            self.at = time.monotonic()

    progress, done = LastProgress(), Future[None]()

    def run() -> None:
        try:
            work(progress)
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="raysgd-upload", daemon=True).start()
    while not wait([done], timeout=max(progress.at + STALLED_S - time.monotonic(), 0.0)).done:
        if time.monotonic() >= progress.at + STALLED_S:
            raise CheckpointError(
                f"{uri} cannot be written: the store has accepted no data for {STALLED_S:g} s. An older object of that name "
                "is unchanged, unless the store completes this write later"
            )
    done.result()


def probe(uri: Uri) -> None:
    """Write and delete a test object: better an error now than after the first epoch."""
    with _asked(uri, "written") as (system, _):
        trial = uri / f".raysgd-{uuid.uuid4().hex[:8]}.tmp"
        write(trial, b"")
        system.rm_file(_system(trial)[1])


def names(uri: Uri) -> list[str]:
    with _asked(uri) as (system, path):
        try:
            entries = system.ls(path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(
            {str(each).rstrip("/").rpartition("/")[2] for each in entries if str(each).strip("/") != path.strip("/")}
        )


def delete(uri: Uri) -> None:
    """Delete an object or a folder, its list first, so that no reader sees a part of it."""
    with _asked(uri, "deleted") as (system, path):
        kind = _kind(system, path)
        if kind == "file":
            system.rm_file(path)
        elif kind is not None:
            if _kind(system, f"{path}/{MARKER}"):
                system.rm_file(f"{path}/{MARKER}")
            system.rm(path, recursive=True)


def rename(uri: Uri, new: Uri) -> None:
    """Give an object or a folder another name. Most stores copy it, and then delete it."""
    with _asked(uri, "renamed") as (system, path):
        system.mv(path, _system(new)[1], recursive=_kind(system, path) == "directory")


# -- folders ------------------------------------------------------------------------------------------


def write_folder(uri: Uri, source: Path) -> None:
    """Upload the files in `source`, and then their list, without which readers see no folder. An
    older folder stays until its list is replaced: files that have the name of one of its files are
    uploaded under another. Then the files of the older list are deleted."""
    older = listed(uri) if uri.is_dir() else {}
    old_names, other = {each.at or name for name, each in older.items()}, uuid.uuid4().hex[:8]
    files = list(folders.walk(source))  # raises for what a checkpoint cannot contain, before anything is changed
    with _asked(uri, "written") as (system, path):
        if _kind(system, path) == "file":
            system.rm_file(path)
    entries = {}
    for each in files:
        if not each.is_dir:
            entry = folders.entry_of(each.path)
            entries[each.name] = replace(entry, at=f"{other}/{each.name}") if each.name in old_names else entry
            upload(uri / (entries[each.name].at or each.name), each.path)
    write(uri / MARKER, folders.dump_list(entries))
    with _asked(uri, "deleted") as (system, path):
        for name in old_names - {each.at or name for name, each in entries.items()}:
            if _kind(system, f"{path}/{name}") == "file":
                system.rm_file(f"{path}/{name}")


def mirror(uri: Uri, source: Path, refuse: Callable[[Path, str], None] = folders.refuse_file) -> None:
    """Upload the files in `source`, without a list. For `refuse`, see `folders.walk`."""
    for each in folders.walk(source, refuse):
        if not each.is_dir:
            upload(uri / each.name, each.path)


def read_folder(uri: Uri, target: Path) -> None:
    """Download a folder's files to `target`, and verify that they are complete and unchanged."""
    entries = listed(uri)
    for name in entries:
        fetch(uri, name, entries, target)


def fetch(uri: Uri, name: str, entries: Mapping[str, FileEntry], target: Path) -> None:
    """Download one file of a folder to `target`, and verify it."""
    file = target / name
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(exist_ok=False)
    except (FileExistsError, NotADirectoryError) as error:
        raise CheckpointError(f"{uri / MARKER} is damaged: {name!r} is listed as a file and a directory") from error
    with _asked(uri / ((entries[name].at if name in entries else "") or name)) as (system, path):
        size = system.info(path).get("size")
        if size is not None:  # before the download, because a damaged object may be too large for the disk
            folders.check_size(uri, name, size, entries)
        system.get_file(path, str(file))
    folders.check_entry(uri, name, folders.entry_of(file), entries)


def listed(uri: Uri) -> dict[str, FileEntry]:
    try:
        content = (uri / MARKER).read_bytes()
    except CheckpointError as error:
        raise CheckpointError(
            f"there is no complete folder at {uri}: {MARKER}, which is written last and lists its files, is missing. Either "
            "the upload was never finished, or another program wrote the folder: in that case, copy it to this machine, and "
            "use Checkpoint.from_directory(copy)"
        ) from error
    return folders.parse_list(content, uri / MARKER)


def is_in_this_process(uri: Uri) -> bool:
    """Whether other processes cannot see what is stored there."""
    with _asked(uri) as (system, _):
        return "memory" in _protocols(system)


# -- the boundary to fsspec ---------------------------------------------------------------------------


@contextmanager
def _asked(uri: Uri, done: str = "read") -> Iterator[tuple[Any, str]]:
    """Yield the file system of a URI and the path in it. Translate the errors of fsspec and of
    stores."""
    try:
        yield _system(uri)
    except (CheckpointError, ConfigError, ImportError, KeyboardInterrupt):
        raise
    except Exception as error:
        missing = isinstance(error, FileNotFoundError)
        if missing and done == "read":
            message = f"there is no checkpoint at {uri}"
        elif missing:
            message = f"{uri} cannot be {done}: check that the bucket or folder exists ({error})"
        else:
            message = f"{uri} cannot be {done} ({described(error)})"
        raise CheckpointError(message) from error


def check_scheme(uri: Uri) -> None:
    """Raise ConfigError for unknown kinds of storage, ImportError for a missing package."""
    _system(uri)


def _system(uri: Uri) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ImportError(f"{uri} needs fsspec: pip install 'raysgd[storage]'") from error
    try:
        system, path = url_to_fs(uri.text)
    except ImportError as error:
        raise ImportError(f"{uri} needs another package: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{uri}: fsspec does not support this kind of storage ({error})") from error
    system.invalidate_cache()  # other processes write there too
    return system, str(path)


def _kind(system: Any, path: str) -> str | None:
    """Find what is there: "file", "directory" or None. (fsspec's own `exists` and `isfile` return
    False if the store cannot be reached.)"""
    try:
        return str(system.info(path)["type"])
    except (FileNotFoundError, NotADirectoryError):
        return None


def _protocols(system: Any) -> set[str]:
    named = system.protocol
    return {named} if isinstance(named, str) else set(named)
