"""Objects in remote storage, through fsspec: complete or absent, like the files of `storage`.

fsspec and the driver of a store (s3fs for `s3://`) are loaded when a URI is first used. Keys and endpoints come from
where fsspec takes them: its configuration files, `FSSPEC_*`, and what the store's own tools read (`AWS_*`).
"""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from raysgd.errors import CheckpointError, ConfigError

__all__ = ["MARKER", "Uri", "delete", "mirror", "names", "probe", "read_folder", "upload", "write", "write_folder"]

SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::[A-Za-z][A-Za-z0-9+.-]*)*://")
MARKER = ".raysgd-folder.json"
STALLED_S = 600.0

# What these are given under a name is there at once and whole, or not at all. With others (sftp, hdfs, smb, ...) we
# write beside the name, and rename.
WHOLE = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci", "memory"}


@dataclass(frozen=True)
class Uri:
    """A place in remote storage, with the names that `pathlib` has for such things."""

    text: str

    @staticmethod
    def is_one(text: str) -> bool:
        return SCHEME.match(text) is not None

    @property
    def name(self) -> str:
        return self._split()[1].rpartition("/")[2]

    @property
    def parent(self) -> Uri:
        head, path = self._split()
        return Uri(head + path.rpartition("/")[0])

    def __truediv__(self, name: str) -> Uri:
        return Uri(f"{self.text.rstrip('/')}/{name}")

    def __str__(self) -> str:
        return self.text

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
        head = SCHEME.match(self.text)
        assert head is not None
        return head.group(), self.text[head.end() :].rstrip("/")


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
        system.rm_file(system._strip_protocol(str(trial)))


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
    with _asked(uri, "written") as (system, path):
        for file in (path, f"{path}/{MARKER}"):
            if _kind(system, file) == "file":
                system.rm_file(file)
    files = mirror(uri, source)
    write(uri / MARKER, json.dumps({"format": "raysgd-folder", "files": files}).encode())
    with _asked(uri, "deleted") as (system, path):
        for name in older.keys() - files.keys():
            if _is_inside(name) and _kind(system, f"{path}/{name}") == "file":
                system.rm_file(f"{path}/{name}")


def mirror(uri: Uri, source: Path) -> dict[str, int]:
    """The files below `source`, one by one, with their sizes."""
    files = {}
    for file in sorted(each for each in source.rglob("*") if each.is_file()):
        name = file.relative_to(source).as_posix()
        upload(uri / name, file)
        files[name] = file.stat().st_size
    return files


def read_folder(uri: Uri, target: Path) -> None:
    """Copies a folder's files below `target`, and checks that they are all there."""
    for name, size in _listed(uri).items():
        if not _is_inside(name):
            raise CheckpointError(f"{uri}: a checkpoint must hold files of its own only, not {name!r}")
        file = target / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with _asked(uri / name) as (system, path):
            system.get_file(path, str(file))
        if file.stat().st_size != size:
            raise CheckpointError(f"{uri}: {name} has {file.stat().st_size} bytes and was stored with {size}")


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts


def _listed(uri: Uri) -> dict[str, int]:
    try:
        content = json.loads((uri / MARKER).read_bytes())
        return {str(name): int(size) for name, size in content["files"].items()}
    except CheckpointError as error:
        raise CheckpointError(
            f"there is no complete folder at {uri}: {MARKER}, which is written last and lists its files, is missing. "
            "Either it was never finished, or it is not from here; then copy it, and use Checkpoint.from_directory"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{uri / MARKER} is damaged, so the folder cannot be read ({error})") from error


# -- the boundary to fsspec ---------------------------------------------------------------------------


@contextmanager
def _asked(uri: Uri, done: str = "read") -> Iterator[tuple[Any, str]]:
    """The file system of a URI and the path in it. Whatever that raises comes out as one of our own."""
    system, path = _system(uri)
    try:
        yield system, path
    except (CheckpointError, KeyboardInterrupt):
        raise
    except FileNotFoundError as error:
        if done == "read":
            raise CheckpointError(f"there is no checkpoint at {uri}") from error
        raise CheckpointError(f"{uri} cannot be {done}: is there such a bucket or folder? ({error})") from error
    except Exception as error:
        raise CheckpointError(f"{uri} cannot be {done} ({type(error).__name__}: {error})") from error


def _system(uri: Uri) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise ImportError(f"{uri} needs fsspec: pip install 'raysgd[storage]'") from error
    try:
        system, path = url_to_fs(uri.text)
    except ImportError as error:
        raise ImportError(f"{uri} needs one more package: {error}") from error
    except ValueError as error:
        raise ConfigError(f"{uri}: fsspec knows no such storage ({error})") from error
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
