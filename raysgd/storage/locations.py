"""Where checkpoints lie: a local path, or a URI of remote storage. What is there is complete."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from raysgd.errors import CheckpointError, ConfigError
from raysgd.storage import folders, remote
from raysgd.storage.durable import DurableFile, host_mark, open_locked, remove_abandoned
from raysgd.storage.masking import mask, without_secrets
from raysgd.storage.remote import Uri

__all__ = [
    "Draft",
    "Place",
    "Uri",
    "check_file",
    "check_folder",
    "copy_logs",
    "delete",
    "draft_folder",
    "folder",
    "names",
    "place",
    "put_folder",
    "read",
    "text_of",
    "warn_without_digest",
    "write",
]

logger = logging.getLogger("raysgd")

Place = Path | Uri
FILE, LOCAL = "file://", "local://"
SPECIAL = {
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
}


def place(where: Any) -> Place:
    """A path, or a URI such as `s3://bucket/run`; `file://` is a path too."""
    if isinstance(where, Uri):
        return where
    if isinstance(where, os.PathLike):
        where = os.fspath(where)
    if not isinstance(where, str) or not where:
        raise ConfigError(f"a checkpoint's place is a path, or a URI such as 's3://bucket/name', got {where!r}")
    if where.startswith(FILE):
        return Path(_path_of(where)).expanduser()
    if where.startswith(LOCAL) or not Uri.is_one(where):
        return Path(where.removeprefix(LOCAL)).expanduser()
    return Uri(where)


def _path_of(uri: str) -> str:
    """`file:///a%20b` is "/a b"; a path may also be given as it is."""
    host, slash, path = uri.removeprefix(FILE).partition("/")
    if host not in ("", "localhost", ".", "..", "~"):
        machine = without_secrets(uri).removeprefix(FILE).partition("/")[0]
        raise ConfigError(f"{mask(uri)} is on the machine {machine!r}: write file:///path for a path on this one")
    return unquote(f"{host if host != 'localhost' else ''}{slash}{path}")


def check_file(where: Place) -> Path | None:
    """Return the local file that a save to `where` creates or replaces: the one that its links lead to; None for a URI.
    Raise an error for what must not be replaced: a directory, a device, a pipe, a socket."""
    if isinstance(where, Uri):
        return None
    kind = _kind(where)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(f"{where} is a directory: a checkpoint is a file, name one")
    if kind in SPECIAL:
        raise ConfigError(
            f"{where} is {SPECIAL[kind]}, and a checkpoint replaces the file of its name: name a regular file, or one that "
            "does not exist yet"
        )
    return _without_link(where)


def check_folder(where: Place) -> Path | None:
    """The same for what becomes a folder. A folder or a file that is there is replaced."""
    if isinstance(where, Uri):
        return None
    kind = _kind(where)
    if kind in SPECIAL:
        raise ConfigError(f"{where} is {SPECIAL[kind]}: name a folder, or one that does not exist yet")
    return _without_link(where)


def _kind(where: Path) -> int | None:
    """What is there, behind all links; None when there is nothing."""
    try:
        return stat.S_IFMT(os.stat(where).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _without_link(where: Path) -> Path:
    """The link at the end of a path must stay, so what is written gets the name that it leads to."""
    return Path(os.path.realpath(where)) if where.is_symlink() else where


def text_of(where: Place) -> str:
    """Return a place as it can be given again, with the secrets that a URI holds; for messages, `str` masks them."""
    return where.text if isinstance(where, Uri) else str(where)


class Draft:
    """A temporary file that becomes `path` when all is written: no reader ever sees half of it. It lies beside `path` (or
    beside the file that `path` is a link to); for a URI it is a local one, which is sent when it is whole."""

    def __init__(self, path: Any) -> None:
        self.path = place(path)
        name = f".{self.path.name}.{host_mark()}.{uuid.uuid4().hex[:8]}.tmp"
        self._target = check_file(self.path)
        if isinstance(self.path, Uri):
            self.path.is_file()  # a store that cannot be reached is an error now, not after the work
        if self._target is None:
            self.temporary = Path(tempfile.gettempdir()) / name
        else:
            # Not tempfile's: its files are for their owner only, and a checkpoint is for whom the umask says.
            self._target.parent.mkdir(parents=True, exist_ok=True)
            self.temporary = self._target.parent / name
        private = isinstance(self.path, Uri)  # everybody's folder is no place for a model that others can read
        # Ctrl-C can come between any two lines, also before the caller has this object.
        self._lost = weakref.finalize(self, self.temporary.unlink, missing_ok=True)
        self._lost.atexit = False  # also a process that was forked from this one would call it
        try:
            self.file = DurableFile(  # keep and drop close it
                self.temporary, "xb", opener=lambda path, flags: open_locked(path, flags, 0o600 if private else 0o666)
            )
            remove_abandoned(self.temporary.parent, self.path.name)
        except BaseException:
            self._lost()
            raise

    def again(self) -> None:
        """What was written is void: from the start."""
        self.file.again()

    def keep(self) -> Place:
        """Syncs, then renames; or sends."""
        self.file.sync()
        lock = os.dup(self.file.fileno())  # it is held until the draft has its name, or nobody needs it any more
        try:
            self.file.close()
            if isinstance(self.path, Uri):
                remote.upload(self.path, self.temporary)
                self.temporary.unlink()
            else:
                assert self._target is not None
                os.replace(self.temporary, self._target)
        finally:
            os.close(lock)
        self._lost.detach()
        return self.path

    def drop(self) -> None:
        try:
            self.file.close()
        finally:
            self._lost()


def write(path: Any, data: Any) -> Place:
    """Writes bytes: the whole file, or none."""
    where = place(path)
    if isinstance(where, Uri):
        remote.write(where, data)
        return where
    draft = Draft(where)
    try:
        left = memoryview(data).cast("B")
        while left:
            left = left[draft.file.write(left) :]
        return draft.keep()
    except BaseException:
        draft.drop()
        raise


def read(path: Any) -> bytes:
    where = place(path)
    if isinstance(where, Uri):
        return where.read_bytes()
    try:
        return _read_plain(where)
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint at {where.absolute()}") from None
    except IsADirectoryError:
        raise CheckpointError(f"{where.absolute()} is a directory; load() takes the file that save() wrote") from None


def _read_plain(path: Path) -> bytes:
    """Not what has no end, or waits for a writer."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise CheckpointError(f"{path.absolute()} is a device, a FIFO or a socket; a checkpoint is a plain file")
    return path.read_bytes()


def warn_without_digest(where: Any) -> None:
    """Say once for each load that damage could not be looked for."""
    logger.warning(
        "%s has no digest, as older versions of raysgd and other programs leave it: if it is damaged, that may not be "
        "noticed. Save it again to add one",
        where,
    )


def names(folder: Place) -> list[str]:
    """What lies directly in it; nothing, where there is no such folder. Drafts are not shown."""
    if isinstance(folder, Uri):
        found = remote.names(folder)
    else:
        found = sorted(os.listdir(folder)) if folder.is_dir() else []
    return [name for name in found if not name.startswith(".")]


@contextmanager
def draft_folder(path: Any) -> Iterator[Path]:
    """An empty local folder, to be filled; it becomes `path` when this ends without an error, whole or not at all."""
    where = place(path)
    if isinstance(where, Uri):
        with tempfile.TemporaryDirectory(prefix="raysgd-checkpoint-") as draft:
            yield Path(draft)
            remote.write_folder(where, Path(draft))
        return
    target = check_folder(where)
    assert target is not None
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.parent / f".{target.name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        beside.mkdir()
        yield beside
        (beside / folders.MARKER).write_bytes(folders.dump_list(folders.list_of(beside)))
        for file in beside.rglob("*"):
            _sync(file)
        put_folder(beside, target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def put_folder(draft: Path, target: Path) -> None:
    """Give a folder the name `target`. What had that name is deleted afterwards; should the renaming fail, it gets its name
    back."""
    old = draft.with_suffix(".old")
    replaces = os.path.lexists(target)
    if replaces:
        os.replace(target, old)
    try:
        os.replace(draft, target)
    except BaseException:
        if replaces:
            os.replace(old, target)
        raise
    if replaces:
        _remove(old)


def _remove(old: Path) -> None:
    """What took its place is there already, so a failure is no error of the caller's."""
    try:
        shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    except OSError as error:
        logger.warning("%s, which was replaced, could not be deleted: %s", old, error)


def _sync(file: Path) -> None:
    if file.is_file():
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())


@contextmanager
def folder(where: Place) -> Iterator[Path]:
    """The folder itself; or, of a remote one, a copy that is there for as long as this lasts."""
    if isinstance(where, Path):
        yield where
        return
    with tempfile.TemporaryDirectory(prefix="raysgd-checkpoint-") as copy:
        if not remote.read_folder(where, Path(copy)):
            warn_without_digest(where)
        yield Path(copy)


def copy_logs(folder: Path, where: Place) -> None:
    """What callbacks have written on this machine, to where the run is stored. Logs are not worth a run, nor may they hide
    why it failed: a store that does not take them is a warning, and so is what is not copied."""
    if isinstance(where, Uri):
        try:
            remote.mirror(where, folder, lambda path, what: logger.warning("%s is not copied: it is %s", path, what))
        except (CheckpointError, OSError) as error:
            logger.warning("the logs stay in %s: %s", folder, error)


def delete(where: Place) -> None:
    """A file or a folder, gone as a whole."""
    if isinstance(where, Uri):
        remote.delete(where)
    elif where.is_dir():
        gone = where.parent / f".{where.name}.{uuid.uuid4().hex[:8]}.tmp"
        os.replace(where, gone)
        shutil.rmtree(gone)
    else:
        where.unlink(missing_ok=True)
