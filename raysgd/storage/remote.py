"""Objects in remote storage, through fsspec: complete or absent, like the files of `storage`.

fsspec and the driver of a store (s3fs for `s3://`) are loaded when a URI is first used. Keys and endpoints come from
where fsspec takes them: its configuration files, `FSSPEC_*`, and what the store's own tools read (`AWS_*`).
"""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysgd.errors import CheckpointError, ConfigError
from raysgd.storage import folders
from raysgd.storage.folders import MARKER, Entry
from raysgd.storage.masking import cause_of, mask, mask_message, split_query, without_secrets

__all__ = ["MARKER", "Uri", "delete", "mirror", "names", "probe", "read_folder", "upload", "write", "write_folder"]

SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::[A-Za-z][A-Za-z0-9+.-]*)*://")
STALLED_S = 600.0

# What these are given under a name is there at once and whole, or not at all. With others (sftp, hdfs, smb, ...) we
# write beside the name, and rename.
WHOLE = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci", "memory"}


@dataclass(frozen=True, repr=False)
class Uri:
    """A place in remote storage, with the names that `pathlib` has for such things.

    `text` is the URI as it was given. `str()`, and so every message, shows `***` for passwords, tokens and signatures.
    """

    text: str

    @staticmethod
    def is_one(text: str) -> bool:
        return SCHEME.match(text) is not None

    @property
    def name(self) -> str:
        return Uri(without_secrets(self.text))._split()[1].rpartition("/")[2]

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
        """Is there a whole object, or a whole folder?"""
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        with _asked(self) as (system, path):
            return _kind(system, path) == "file"

    def is_dir(self) -> bool:
        """A folder is there when its last part is: the list of the others."""
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
    """The whole object, or none; an older one of this name stays until then."""
    _put(uri, lambda system, path, moved: system.pipe_file(path, bytes(data)))


def upload(uri: Uri, file: Path) -> None:
    """The same, from a local file, without having it in memory."""
    _put(uri, lambda system, path, moved: system.put_file(str(file), path, callback=moved))


def _put(uri: Uri, put: Callable[[Any, str, Any], None]) -> None:
    def send(system: Any, path: str) -> None:
        _limited(uri, lambda moved: put(system, path, moved))

    with _asked(uri, "written") as (system, path):
        if _protocols(system) & WHOLE:
            send(system, path)
            return
        draft = f"{path}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            system.makedirs(system._parent(path), exist_ok=True)
            send(system, draft)
            system.mv(draft, path)
        except BaseException:
            if _kind(system, draft):
                system.rm_file(draft)
            raise


def _limited(uri: Uri, work: Callable[[Any], None]) -> None:
    """Run `work(moved)` on a thread of its own, where `moved` is what fsspec tells of its progress. Raise CheckpointError
    when it neither ends nor moves for STALLED_S: the stores' own limits are not known, and some have none."""
    from fsspec.callbacks import Callback

    class Moved(Callback):  # type: ignore[misc]
        at = time.monotonic()

        def call(self, *args: Any, **kwargs: Any) -> None:
            self.at = time.monotonic()

    moved, done = Moved(), Future[None]()

    def run() -> None:
        try:
            work(moved)
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="raysgd-upload", daemon=True).start()
    while not wait([done], timeout=max(moved.at + STALLED_S - time.monotonic(), 0.0)).done:
        if time.monotonic() >= moved.at + STALLED_S:
            raise CheckpointError(
                f"{uri} cannot be written: the store has taken nothing for {STALLED_S:g} s. What was there before is "
                "unharmed, unless the store completes this later"
            )
    done.result()


def probe(uri: Uri) -> None:
    """Can one write there? Better an error now than at the end of the first epoch."""
    with _asked(uri, "written") as (system, _):
        trial = uri / f".raysgd-{uuid.uuid4().hex[:8]}.tmp"
        write(trial, b"")
        system.rm_file(system._strip_protocol(trial.text))


def names(uri: Uri) -> list[str]:
    """What lies directly below; nothing, where there is nothing."""
    with _asked(uri) as (system, path):
        try:
            found = system.ls(path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(
            {str(each).rstrip("/").rpartition("/")[2] for each in found if str(each).strip("/") != path.strip("/")}
        )


def delete(uri: Uri) -> None:
    """An object, or a folder: its list first, so that it is never there in part."""
    with _asked(uri, "deleted") as (system, path):
        kind = _kind(system, path)
        if kind == "file":
            system.rm_file(path)
        elif kind is not None:
            if _kind(system, f"{path}/{MARKER}"):
                system.rm_file(f"{path}/{MARKER}")
            system.rm(path, recursive=True)


# -- folders ------------------------------------------------------------------------------------------


def write_folder(uri: Uri, source: Path) -> None:
    """The files below `source`, and then the list of them. Without the list there is no folder for a reader. Of what was
    there before only the files of an older such folder go."""
    older = _listed(uri) if uri.is_dir() else {}
    found = list(folders.walk(source))  # what is refused is refused before anything is removed
    with _asked(uri, "written") as (system, path):
        for file in (path, f"{path}/{MARKER}"):
            if _kind(system, file) == "file":
                system.rm_file(file)
    entries = {}
    for each in found:
        if not each.is_dir:
            entries[each.name] = folders.entry_of(each.path)
            upload(uri / each.name, each.path)
    write(uri / MARKER, folders.dump_list(entries))
    with _asked(uri, "deleted") as (system, path):
        for name in older.keys() - entries.keys():
            if _kind(system, f"{path}/{name}") == "file":
                system.rm_file(f"{path}/{name}")


def mirror(uri: Uri, source: Path, refuse: Callable[[Path, str], None] = folders.refuse_file) -> None:
    """The files below `source`, one by one, and no list. `refuse` is called for links that lead out of it, and for what is
    no file."""
    for each in folders.walk(source, refuse):
        if not each.is_dir:
            upload(uri / each.name, each.path)


def read_folder(uri: Uri, target: Path) -> bool:
    """Copies a folder's files below `target`, and checks that they are all there, and as they were stored. Returns whether
    there were digests to check them with: lists of older versions have none."""
    listed = _listed(uri)
    for name in listed:
        file = target / name
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(exist_ok=False)
        except (FileExistsError, NotADirectoryError) as error:
            raise CheckpointError(f"{uri / MARKER} is damaged: {name!r} is listed as a file and a directory") from error
        with _asked(uri / name) as (system, path):
            size = system.info(path).get("size")
            if size is not None:  # before it is copied: it may be too large for the disk
                folders.check_size(uri, name, size, listed)
            system.get_file(path, str(file))
        folders.check_entry(uri, name, folders.entry_of(file), listed)
    return all(entry.digest is not None for entry in listed.values())


def _listed(uri: Uri) -> dict[str, Entry]:
    try:
        content = (uri / MARKER).read_bytes()
    except CheckpointError as error:
        raise CheckpointError(
            f"there is no complete folder at {uri}: {MARKER}, which is written last and lists its files, is missing. "
            "Either it was never finished, or it is not from here; then copy it, and use Checkpoint.from_directory"
        ) from error
    return folders.parse_list(content, uri / MARKER)


# -- the boundary to fsspec ---------------------------------------------------------------------------


@contextmanager
def _asked(uri: Uri, done: str = "read") -> Iterator[tuple[Any, str]]:
    """The file system of a URI and the path in it. Whatever that raises comes out as one of our own, without the secrets
    that such errors repeat."""
    try:
        system, path = _system(uri)
        yield system, path
    except (CheckpointError, ConfigError, ImportError, KeyboardInterrupt):
        raise
    except FileNotFoundError as error:
        if done == "read":
            raise CheckpointError(f"there is no checkpoint at {uri}") from cause_of(error, uri.text)
        said = mask_message(str(error), uri.text)
        raise CheckpointError(f"{uri} cannot be {done}: is there such a bucket or folder? ({said})") from cause_of(
            error, uri.text
        )
    except Exception as error:
        said = mask_message(str(error), uri.text)
        raise CheckpointError(f"{uri} cannot be {done} ({type(error).__name__}: {said})") from cause_of(error, uri.text)


def _system(uri: Uri) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ImportError(f"{uri} needs fsspec: pip install 'raysgd[storage]'") from error
    try:
        system, path = url_to_fs(uri.text)
    except ImportError as error:
        said = mask_message(str(error), uri.text)
        raise ImportError(f"{uri} needs one more package: {said}") from cause_of(error, uri.text)
    except ValueError as error:
        said = mask_message(str(error), uri.text)
        raise ConfigError(f"{uri}: fsspec knows no such storage ({said})") from cause_of(error, uri.text)
    system.invalidate_cache()  # others write there too
    return system, str(path)


def _kind(system: Any, path: str) -> str | None:
    """What is there. (fsspec's own `exists` and `isfile` say no when the store cannot be asked.)"""
    try:
        return str(system.info(path)["type"])
    except (FileNotFoundError, NotADirectoryError):
        return None


def _protocols(system: Any) -> set[str]:
    named = system.protocol
    return {named} if isinstance(named, str) else set(named)
