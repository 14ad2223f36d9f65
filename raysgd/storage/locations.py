"""Read and write checkpoints at paths or URIs, each completely or not at all. Both."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import tempfile
import time
import uuid
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from raysgd.errors import CheckpointError, ConfigError, shown
from raysgd.storage import durable, folders, remote
from raysgd.storage.durable import DurableFile
from raysgd.storage.folders import FileEntry
from raysgd.storage.masking import mask
from raysgd.storage.remote import Uri

logger = logging.getLogger("raysgd")

Place = Path | Uri
FILE, LOCAL = "file://", "local://"
SPECIAL = {
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
}


def place_to_save(where: Any) -> Place:
    """The place for a path, made absolute so that users find the file, or for a URI."""
    path = usable_place(where)
    if not isinstance(path, Uri):
        return path.absolute()
    remote.check_scheme(path)
    return path


def usable_place(where: Any) -> Place:
    """The place for a path or a URI. Raise ConfigError if nothing can be there."""
    path = place(where)
    if isinstance(path, Uri):
        if not path.name:
            raise ConfigError(f"{path} names no file or folder in the store: write {path}name")
        return path
    try:
        kind = SPECIAL.get(stat.S_IFMT(os.stat(path).st_mode))
    except ValueError as error:  # a null character
        raise ConfigError(f"{str(path)!r} cannot be a path: {error}") from None
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
            raise ConfigError(f"{path} cannot be a path here: {error.strerror}") from None
        return path  # it does not exist, or what is done next shows the reason
    if kind is not None:
        raise ConfigError(f"{path} is {kind}: pass the path of a regular file or a folder, or one that does not exist")
    return path


def place(where: Any, name: str = "a checkpoint's place") -> Place:
    """The place for a path or a URI such as `s3://bucket/run`. A `file://` URI is a path. Errors
    call it by its `name`."""
    if isinstance(where, Uri):
        return where
    if isinstance(where, os.PathLike):
        where = os.fspath(where)
    if not isinstance(where, str) or not where:
        hint = ". load_state_dict() takes a dictionary" if isinstance(where, Mapping) else ""
        raise ConfigError(f"{name} must be a path, or a URI such as 's3://bucket/name', got {shown(where)}{hint}")
    if where.startswith(FILE):
        return Path(_path_of(where)).expanduser()
    if where.startswith(LOCAL) or not Uri.is_one(where):
        return Path(where.removeprefix(LOCAL)).expanduser()
    return Uri(where)


def _path_of(uri: str) -> str:
    """The path in a URI: "/a b" for `file:///a%20b`. A path need not be quoted."""
    host, slash, path = uri.removeprefix(FILE).partition("/")
    if host not in ("", "localhost", ".", "..", "~"):
        machine = host.rpartition("@")[2]
        raise ConfigError(f"{mask(uri)} is on the machine {machine!r}: write file:///path for a path on this machine")
    return unquote(f"{host if host != 'localhost' else ''}{slash}{path}")


def text_of(where: Place) -> str:
    """A place as users can pass it again, with a URI's secrets, which `str` masks."""
    return where.text if isinstance(where, Uri) else str(where)


def check_file(where: Place) -> Path | None:
    """Find the local file that a save to `where` creates or replaces, with a link resolved, or None
    for a URI. Raise an error for what a save must not replace: a directory, a device, a pipe or a
    socket."""
    if isinstance(where, Path) and where.is_dir():
        raise IsADirectoryError(f"{where} is a directory, but a checkpoint is a file: pass the path of a file")
    return check_folder(where)


def check_folder(where: Place) -> Path | None:
    """Find the local folder that a save to `where` creates, with a link resolved, or None for a
    URI. Raise an error for a device, a pipe or a socket."""
    if isinstance(where, Uri):
        return None
    usable_place(where)
    return Path(os.path.realpath(where)) if where.is_symlink() else where  # the link is not replaced


def draft_name(name: str) -> str:
    """Make a new name for what becomes `name` when it is complete."""
    return f".{name}.{uuid.uuid4().hex[:8]}.tmp"


class Draft:
    """A temporary file that becomes `path` when it is complete, so that no reader sees an
    incomplete one. It is in the folder of `path` (or of the file that `path` is a link to). For a
    URI it is a local file, which `keep` uploads."""

    def __init__(self, path: Any) -> None:
        self.path = place(path)
        name = draft_name(self.path.name)
        self._target = check_file(self.path)
        if isinstance(self.path, Uri):
            self.path.is_file()  # raises an error now, before the work, if the store cannot be reached
        if self._target is None:
            self.temporary = Path(tempfile.gettempdir()) / name
        else:
            durable.make_folder(self._target.parent)
            self.temporary = self._target.parent / name
        # Other users can read the temporary folder. Elsewhere, a checkpoint gets the mode that the umask allows.
        mode = 0o600 if self._target is None else 0o666
        # Ctrl-C can interrupt any line, even before the caller has this object.
        self._lost = weakref.finalize(self, self.temporary.unlink, missing_ok=True)
        self._lost.atexit = False  # a process that was forked from this one would call it, too
        try:
            # keep and drop close it
            self.file = DurableFile(self.temporary, "xb", opener=lambda path, flags: os.open(path, flags, mode))
        except BaseException:
            self._lost()
            raise

    def keep(self) -> Place:
        """Sync the file, rename it, and sync its folder, or upload it. Return its place."""
        self.file.sync()
        self.file.close()
        if isinstance(self.path, Uri):
            remote.upload(self.path, self.temporary)
            self.temporary.unlink()
        else:
            assert self._target is not None
            durable.rename(self.temporary, self._target)
        self._lost.detach()
        return self.path

    def drop(self) -> None:
        try:
            self.file.close()
        finally:
            self._lost()


def write(path: Any, data: Any) -> Place:
    """Write bytes to a file or an object, completely or not at all."""
    where = place(path)
    if isinstance(where, Uri):
        remote.write(where, data)
        return where
    draft = Draft(where)
    try:
        draft.file.write_all(data)
        return draft.keep()
    except BaseException:
        draft.drop()
        raise


def read(path: Any) -> bytes:
    """Read a file or an object. Raise CheckpointError if there is none, if it cannot be read, or if
    it is a device or a pipe, which may have no end."""
    where = place(path)
    if isinstance(where, Uri):
        return where.read_bytes()
    try:
        if stat.S_IFMT(where.stat().st_mode) in SPECIAL:
            raise CheckpointError(
                f"{where.absolute()} is a device, a FIFO or a socket: pass the path of a regular file"
            )
        return where.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"there is no checkpoint at {where.absolute()}") from None
    except IsADirectoryError:
        raise CheckpointError(f"{where.absolute()} is a directory: pass load() the file that save() wrote") from None
    except OSError as error:
        raise CheckpointError(f"{where.absolute()} cannot be read: {error.strerror}") from error


def names(folder: Place) -> list[str]:
    """List the names in a folder without drafts; none if it does not exist."""
    if isinstance(folder, Uri):
        entries = remote.names(folder)
    else:
        entries = sorted(os.listdir(folder)) if folder.is_dir() else []
    return [name for name in entries if not name.startswith(".")]


class FolderDraft:
    """A local folder that is renamed to `path`, or uploaded there, when it is complete, so that no
    reader sees an incomplete one. It is beside `path`, where nothing but an empty folder may be,
    or, for a URI, a temporary folder."""

    def __init__(self, path: Any) -> None:
        self.path = place(path)
        self._target = check_folder(self.path)
        if self._target is None:
            self.folder = Path(tempfile.mkdtemp(prefix="raysgd-checkpoint-"))
        else:
            durable.make_folder(self._target.parent)
            self.folder = self._target.parent / draft_name(self._target.name)
            self.folder.mkdir()

    def keep(self, entries: Mapping[str, FileEntry] | None = None) -> None:
        """Store the folder with the list of its files, whose `entries` the caller may know."""
        if isinstance(self.path, Uri):
            remote.write_folder(self.path, self.folder)
            return
        assert self._target is not None
        entries = entries or folders.list_of(self.folder)
        (self.folder / folders.MARKER).write_bytes(folders.dump_list(entries))
        for name in (*entries, folders.MARKER):
            with open(self.folder / name, "rb") as opened:
                os.fsync(opened.fileno())
        for each in [self.folder, *(path for path in self.folder.rglob("*") if path.is_dir())]:
            durable.sync_folder(each)
        durable.rename(self.folder, self._target)

    def drop(self) -> None:
        """Delete what is left, again and again, because a worker that does not know of the failure
        of a save may still write to it."""
        for pause_s in (0.0, 0.1, 0.5, 2.0):
            time.sleep(pause_s)
            shutil.rmtree(self.folder, ignore_errors=True)
            if not self.folder.exists():
                return
        logger.warning("%s, of a save that failed, could not be deleted", self.folder)


@contextmanager
def draft_folder(path: Any) -> Iterator[Path]:
    """Yield an empty local folder to fill. When the block ends without an error, the folder is
    renamed or uploaded to `path`, completely or not at all."""
    draft = FolderDraft(path)
    try:
        yield draft.folder
        draft.keep()
    finally:
        draft.drop()


@contextmanager
def folder(where: Place) -> Iterator[Path]:
    """Yield a local folder itself, or a temporary local copy of a remote one."""
    if isinstance(where, Path):
        yield where
        return
    with tempfile.TemporaryDirectory(prefix="raysgd-checkpoint-") as local:
        remote.read_folder(where, Path(local))
        yield Path(local)


def copy_logs(folder: Path, where: Place) -> None:
    """Copy what callbacks wrote on this machine to where the run is stored. Failures are only
    logged, because they must neither end a run nor hide why it failed."""
    if isinstance(where, Uri):
        try:
            remote.mirror(where, folder, lambda path, what: logger.warning("%s is not copied: it is %s", path, what))
        except (CheckpointError, OSError) as error:
            logger.warning("the logs were not copied to %s, and stay in %s: %s", where, folder, error)


def move_aside(where: Place) -> Place:
    """Rename a file or a folder to a new name beside it. Return its new place."""
    name = f"{where.name}.kept-{uuid.uuid4().hex[:8]}"
    if isinstance(where, Uri):
        remote.rename(where, where.parent / name)
    else:
        os.replace(where, where.parent / name)
    return where.parent / name


def delete(where: Place) -> None:
    """Delete a file or a folder, if it exists. A folder disappears all at once."""
    if isinstance(where, Uri):
        remote.delete(where)
    elif where.is_dir():
        renamed = where.parent / draft_name(where.name)
        os.replace(where, renamed)
        shutil.rmtree(renamed)
    else:
        where.unlink(missing_ok=True)
