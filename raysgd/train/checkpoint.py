"""A checkpoint of a function's: a dictionary, or a folder of files. It travels as bytes and is stored as it is."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import tarfile
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from raysgd import storage
from raysgd.errors import CheckpointError, ConfigError
from raysgd.storage import Place, Uri
from raysgd.train import unpickling

__all__ = ["DICT_FILE", "Checkpoint", "is_directory", "unpack"]

METADATA_FILE = ".metadata.json"
METADATA_KEY = "_metadata"
DICT_FILE = "checkpoint.pkl"
PICKLE = b"\x80"  # how every pickle of ours begins
Dumps = Callable[[Any], bytes]


class Checkpoint:
    """A dictionary in memory, a file that holds one, or a folder of files; the last two on this machine's disk or under a
    URI. Immutable but for its metadata.

        train.report({"loss": 0.1}, checkpoint=Checkpoint.from_dict({"epoch": 3}))
        Checkpoint("s3://bucket/run_001/checkpoints/checkpoint_000003").to_dict()

    Reading a stored dictionary runs no code from it, so it may hold plain values, arrays and tensors. For one with objects
    of other types, which you or somebody you trust made, pass `trusted=True`.
    """

    _place: Place | None
    _data: dict[str, Any] | None
    _trusted: bool

    def __init__(self, path: str | Path | Uri, *, trusted: bool = False) -> None:
        self._place, self._data, self._trusted = storage.place(path), None, trusted

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Checkpoint:
        if not isinstance(data, Mapping):
            raise ConfigError(f"Checkpoint.from_dict takes a dict, got {data!r}")
        made = cls.__new__(cls)
        made._place, made._data, made._trusted = None, dict(data), True
        return made

    @classmethod
    def from_directory(cls, path: str | Path, *, trusted: bool = False) -> Checkpoint:
        """The files stay where they are until the checkpoint is reported or copied."""
        if not Path(path).is_dir():
            raise CheckpointError(f"there is no directory {Path(path).absolute()}")
        return cls(path, trusted=trusted)

    @classmethod
    def from_uri(cls, uri: str | Path | Uri, *, trusted: bool = False) -> Checkpoint:
        """What is stored there: `s3://bucket/name`, `file:///folder/name`, or a path. Nothing is copied yet."""
        made = cls(uri, trusted=trusted)
        if not made._stored().exists():
            raise CheckpointError(
                f"there is no complete checkpoint at {uri}: neither a file, nor a folder that was written to its end"
            )
        return made

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, *, trusted: bool = False) -> Checkpoint:
        """What `to_bytes` gave. A folder is unpacked into a temporary one, which is there for as long as this object."""
        if not is_directory(data):
            return cls.from_dict(_unpickled(data, "these bytes", trusted))
        target = tempfile.mkdtemp(prefix="raysgd-checkpoint-")
        made = cls(target, trusted=trusted)
        weakref.finalize(made, _remove, target, os.getpid())
        unpack(data, target)
        return made

    def to_bytes(self, *, dumps: Dumps = pickle.dumps) -> bytes:
        if self._data is not None:
            return dumps(self._data)
        if not self._is_folder():
            return storage.read(self._stored())
        stream = io.BytesIO()
        with storage.folder(self._stored()) as folder, _archive(stream) as archive:
            archive.add(folder, arcname=".")
        return stream.getvalue()

    def checked_bytes(self, *, dumps: Dumps = pickle.dumps, users_files: bool = False) -> bytes:
        """The same for those who will read them as trusted: what is stored, and would not be read, raises here."""
        data = self.to_bytes(dumps=dumps)
        if self._place is not None and not is_directory(data):
            _unpickled(data, str(self._place), self._trusted)
        elif self._is_folder() and (self._stored() / DICT_FILE).is_file():
            # A file of the user's own may have that name. What does not begin as ours do is never unpickled.
            ours = unpickling.is_dictionary(storage.read(self._stored() / DICT_FILE))
            if ours or not users_files:
                self.to_dict()
        return data

    def to_dict(self) -> dict[str, Any]:
        if self._data is not None:
            return dict(self._data)
        where = self._stored()
        if self._is_folder():
            where = where / DICT_FILE
            if not where.is_file():
                raise CheckpointError(f"{self.path} is a folder of files, not a dictionary: use as_directory()")
        return _unpickled(storage.read(where), str(where), self._trusted)

    def to_directory(self, path: str | Path | None = None) -> str:
        """Copies the files to `path` (or a new temporary directory), and returns where they are. A dictionary becomes one
        file, which `from_directory(...).to_dict()` reads."""
        target = Path(path or tempfile.mkdtemp(prefix="raysgd-checkpoint-"))
        if self._is_folder():
            with storage.folder(self._stored()) as folder:
                shutil.copytree(folder, target, dirs_exist_ok=True)
        else:
            storage.write(target / DICT_FILE, self.to_bytes())
        return str(target)

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        """A directory with the files, for reading: the one they are in, or one that is there for as long as this lasts."""
        if self._is_folder():
            with storage.folder(self._stored()) as folder:
                yield str(folder)
            return
        with tempfile.TemporaryDirectory(prefix="raysgd-checkpoint-") as copy:
            yield self.to_directory(copy)

    def to_uri(self, uri: str | Path | Uri, *, dumps: Dumps = pickle.dumps) -> str:
        """Stores it there, whole or not at all, and returns the URI: an object for a dictionary, files for a folder, which
        must be new or empty (under a URI, also one that a checkpoint was stored in)."""
        where = storage.place(uri)
        if not self._is_folder():
            storage.check_file(where)
            storage.write(where, self.to_bytes(dumps=dumps))
        else:
            storage.check_folder(where)
            _check_free(where)
            with storage.folder(self._stored()) as folder, storage.draft_folder(where) as draft:
                shutil.copytree(folder, draft, dirs_exist_ok=True)
        return str(uri)

    @property
    def path(self) -> str | None:
        """Where it is stored, a path or a URI; None for a dictionary in memory."""
        return None if self._place is None else str(self._place)

    def get_internal_representation(self) -> tuple[str, Any]:
        """("data_dict", the dictionary), ("local_path", where it is stored) or ("uri", where it is stored)."""
        if self._place is None:
            return "data_dict", self._data
        return "uri" if isinstance(self._place, Uri) else "local_path", str(self._place)

    def _stored(self) -> Place:
        assert self._place is not None
        return self._place

    def _is_folder(self) -> bool:
        return self._place is not None and self._place.is_dir()

    # -- metadata -------------------------------------------------------------------------------------

    def get_metadata(self) -> dict[str, Any]:
        if not self._is_folder():
            return dict(self.to_dict().get(METADATA_KEY, {}))
        file = self._stored() / METADATA_FILE
        return dict(json.loads(file.read_bytes())) if file.is_file() else {}

    @property
    def can_have_metadata(self) -> bool:
        """Those of a stored dictionary, and of what lies under a URI, stay as they are."""
        return self._data is not None or (isinstance(self._place, Path) and self._is_folder())

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replaces the metadata; they must be plain JSON."""
        text = json.dumps(dict(metadata))
        if self._data is not None:
            self._data[METADATA_KEY] = dict(metadata)
        elif self.can_have_metadata:
            storage.write(self._stored() / METADATA_FILE, text.encode())
        else:
            raise CheckpointError(
                f"the metadata of what is stored at {self.path} cannot be changed; from_dict(to_dict()), or "
                "from_directory(to_directory()), gives a copy whose metadata can"
            )

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        self.set_metadata({**self.get_metadata(), **metadata})

    def __repr__(self) -> str:
        what = f"keys {sorted(self._data)}" if self._data is not None else self.path
        return f"Checkpoint({what})"


def _check_free(where: Place) -> None:
    """Nothing of somebody else's is deleted to make room."""
    if isinstance(where, Uri):
        taken = not where.is_dir() and (where.is_file() or bool(storage.names(where)))
    else:
        taken = where.is_file() or (where.is_dir() and any(where.iterdir()))
    if taken:
        raise CheckpointError(f"there is something else at {where} already: name a folder that is new, or empty")


def _archive(stream: io.BytesIO) -> tarfile.TarFile:
    """Links become the files that they are links to: for a reader there is nothing they could point to."""
    return tarfile.open(fileobj=stream, mode="w", dereference=True)


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:  # a fork has a copy of the object, not of the folder
        shutil.rmtree(folder, ignore_errors=True)


def is_directory(data: bytes | memoryview) -> bool:
    """Are these the bytes of a folder (a tar archive), or of a dictionary?"""
    return bytes(data[257:262]) == b"ustar" and bytes(data[:1]) != PICKLE


def unpack(data: bytes | memoryview, target: str | Path) -> None:
    """A folder's archive into `target`; entries that point outside are refused."""
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            root = Path(target).resolve()
            for member in archive.getmembers():
                place = (root / member.name).resolve()
                if not place.is_relative_to(root) or not (member.isfile() or member.isdir()):
                    raise CheckpointError(
                        f"a checkpoint must hold plain files and directories only, not {member.name!r}"
                    )
            archive.extractall(root)
    except (tarfile.TarError, EOFError) as error:
        raise CheckpointError(f"the archive of a checkpoint's files is damaged ({error})") from error


def _unpickled(data: Any, where: str, trusted: bool) -> dict[str, Any]:
    ours = unpickling.is_dictionary(data)
    try:
        if not ours:
            raise CheckpointError("it does not begin as a pickled dictionary does")
        content = pickle.loads(data) if trusted else unpickling.read(data)
    except unpickling.Refused as error:
        raise CheckpointError(
            f"{where}: it holds {error}, and rebuilding such objects can run code from the file; plain values, arrays and "
            "tensors need none. If you made it yourself, use Checkpoint(path, trusted=True)"
        ) from error
    except ModuleNotFoundError as error:
        raise CheckpointError(f"{where}: reading it needs {error.name}, which is not installed here") from error
    except Exception as error:
        raise CheckpointError(f"{where}: not a checkpoint of a function's, or damaged ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{where}: a checkpoint of a function's is a dictionary, this is a {type(content).__name__}"
        )
    return content
