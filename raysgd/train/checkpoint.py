"""A checkpoint of a function's: a dictionary, or a folder of files. It travels as bytes and is stored as it is."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from raysgd.errors import CheckpointError, ConfigError
from raysgd.storage import archives, digest, folders, locations
from raysgd.storage.locations import Place, Uri
from raysgd.storage.masking import mask
from raysgd.train import unpickling

__all__ = ["DICT_FILE", "Checkpoint", "is_directory", "unlist_metadata", "unpack"]

METADATA_FILE = ".metadata.json"
METADATA_KEY = "_metadata"
DICT_FILE = "checkpoint.pkl"
PICKLE, STOP = b"\x80", b"."  # how every pickle of ours begins, and how every pickle ends
Dumps = Callable[[Any], bytes]


class Checkpoint:
    """A dictionary in memory, a file that holds one, or a folder of files; the last two on this machine's disk or under a
    URI. Immutable but for its metadata. What is stored has a digest, and reading checks it: a file that was damaged, or
    changed, is a CheckpointError.

        train.report({"loss": 0.1}, checkpoint=Checkpoint.from_dict({"epoch": 3}))
        Checkpoint("s3://bucket/run_001/checkpoints/checkpoint_000003").to_dict()

    Reading a stored dictionary runs no code from it, so it may hold plain values, arrays and tensors. For one with objects
    of other types, which you or somebody you trust made, pass `trusted=True`.
    """

    _place: Place | None
    _data: dict[str, Any] | None
    _trusted: bool
    _covered = False  # by the digest of the archive that it came in

    def __init__(self, path: str | Path | Uri, *, trusted: bool = False) -> None:
        self._place, self._data, self._trusted = locations.place(path), None, trusted

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
                f"there is no complete checkpoint at {mask(str(uri))}: neither a file, nor a folder that was written to its end"
            )
        return made

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, *, trusted: bool = False) -> Checkpoint:
        """What `to_bytes` gave. A folder is unpacked into a temporary one, which is there for as long as this object."""
        data = _checked(data, "these bytes")
        if not is_directory(data):
            return cls.from_dict(_unpickled(data, "these bytes", trusted))
        target = tempfile.mkdtemp(prefix="raysgd-checkpoint-")
        made = cls(target, trusted=trusted)
        weakref.finalize(made, _remove, target, os.getpid())
        archives.unpack(data, Path(target))
        made._covered = True
        return made

    def to_bytes(self, *, dumps: Dumps = pickle.dumps) -> bytes:
        """The whole of it, with a digest behind its end: a pickled dictionary, or a tar archive of the files."""
        if self._data is not None:
            return digest.sealed(dumps(self._data))
        if not self._is_folder():
            return _checked(locations.read(self._stored()), self._stored())
        with self._folder() as folder:
            return archives.pack(folder)

    def checked_bytes(self, *, dumps: Dumps = pickle.dumps, users_files: bool = False) -> bytes:
        """The same for those who will read them as trusted: what is stored, and would not be read, raises here."""
        data = self.to_bytes(dumps=dumps)
        if self._place is not None and not is_directory(data):
            _unpickled(data, str(self._place), self._trusted)
        elif self._is_folder() and (self._stored() / DICT_FILE).is_file():
            # A file of the user's own may have that name. What does not begin as ours do is never unpickled.
            ours = unpickling.is_dictionary(locations.read(self._stored() / DICT_FILE))
            if ours or not users_files:
                self.to_dict()
        return data

    def to_dict(self) -> dict[str, Any]:
        if self._data is not None:
            return dict(self._data)
        where = self._stored()
        if not self._is_folder():
            return _unpickled(_checked(locations.read(where), where), str(where), self._trusted)
        if not (where / DICT_FILE).is_file():
            raise CheckpointError(f"{where} is a folder of files, not a dictionary: use as_directory()")
        data, covered = self._listed(DICT_FILE)
        data = _checked(data, where / DICT_FILE, covered=covered)
        return _unpickled(data, str(where / DICT_FILE), self._trusted)

    def _listed(self, name: str) -> tuple[bytes, bool]:
        """The content of a file of the folder, checked against its list, and whether there was a digest."""
        where = self._stored()
        if isinstance(where, Uri):
            return locations.read(where / name), False
        data, listed = locations.read(folders.inside(where, name)), folders.read_list(where) or {}
        folders.check_entry(where, name, folders.entry_of_bytes(data), listed)
        return data, self._covered or name in listed

    def to_directory(self, path: str | Path | None = None) -> str:
        """Copies the files to `path` (or a new temporary directory), and returns where they are. A dictionary becomes one
        file, which `from_directory(...).to_dict()` reads."""
        target = Path(path or tempfile.mkdtemp(prefix="raysgd-checkpoint-"))
        entries = self._copied(target)
        locations.write(target / folders.MARKER, folders.dump_list(entries))
        return str(target)

    def _copied(self, target: Path) -> dict[str, folders.Entry]:
        if self._is_folder():
            with self._folder() as folder:
                target.mkdir(parents=True, exist_ok=True)
                return folders.copy(folder, target)
        data = self.to_bytes()
        locations.write(target / DICT_FILE, data)
        return {DICT_FILE: folders.entry_of_bytes(data)}

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        """A directory with the files, for reading: the one they are in, or one that is there for as long as this lasts."""
        if self._is_folder():
            with self._folder() as folder:
                folders.verify(folder)
                yield str(folder)
            return
        with tempfile.TemporaryDirectory(prefix="raysgd-checkpoint-") as copy:
            self._copied(Path(copy))
            yield copy

    def _folder(self) -> contextlib.AbstractContextManager[Path]:
        return locations.folder(self._stored())

    def to_uri(self, uri: str | Path | Uri, *, dumps: Dumps = pickle.dumps) -> str:
        """Stores it there, whole or not at all, and returns the URI: an object for a dictionary, files for a folder, which
        must be new or empty (under a URI, also one that a checkpoint was stored in)."""
        where = locations.place(uri)
        if not self._is_folder():
            locations.check_file(where)
            locations.write(where, self.to_bytes(dumps=dumps))
        else:
            locations.check_folder(where)
            _check_free(where)
            with self._folder() as folder, locations.draft_folder(where) as draft:
                folders.copy(folder, draft)
        return locations.text_of(uri) if isinstance(uri, Uri) else str(uri)

    @property
    def path(self) -> str | None:
        """Where it is stored, a path or a URI; None for a dictionary in memory. It is the URI as it was given, with any
        password and token in it, so that it can be used. Messages and `repr` show `***` for these."""
        return None if self._place is None else locations.text_of(self._place)

    def get_internal_representation(self) -> tuple[str, Any]:
        """("data_dict", the dictionary), ("local_path", where it is stored) or ("uri", where it is stored)."""
        if self._place is None:
            return "data_dict", self._data
        return "uri" if isinstance(self._place, Uri) else "local_path", locations.text_of(self._place)

    def _stored(self) -> Place:
        assert self._place is not None
        return self._place

    def _is_folder(self) -> bool:
        return self._place is not None and self._place.is_dir()

    # -- metadata -------------------------------------------------------------------------------------

    def get_metadata(self) -> dict[str, Any]:
        if not self._is_folder():
            where, found = "the checkpoint", self.to_dict().get(METADATA_KEY, {})
        else:
            where, found = f"{self._stored() / METADATA_FILE}", {}
            if (self._stored() / METADATA_FILE).is_file():
                try:
                    found = json.loads(self._listed(METADATA_FILE)[0])
                except (ValueError, RecursionError) as error:
                    raise CheckpointError(f"{where} is damaged: it is not JSON ({error})") from error
        if not isinstance(found, Mapping):
            raise CheckpointError(f"{where} is damaged: metadata are a dictionary, not a {type(found).__name__}")
        return dict(found)

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
            _write_listed(Path(locations.text_of(self._stored())), METADATA_FILE, text.encode())
        else:
            raise CheckpointError(
                f"the metadata of what is stored at {self._place} cannot be changed; from_dict(to_dict()), or "
                "from_directory(to_directory()), gives a copy whose metadata can"
            )

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        self.set_metadata({**self.get_metadata(), **metadata})

    def __repr__(self) -> str:
        what = f"keys {sorted(map(str, self._data))}" if self._data is not None else self._place
        return f"Checkpoint({what})"


def _check_free(where: Place) -> None:
    """Nothing of somebody else's is deleted to make room."""
    if isinstance(where, Uri):
        taken = not where.is_dir() and (where.is_file() or bool(locations.names(where)))
    else:
        taken = where.is_file() or (where.is_dir() and any(where.iterdir()))
    if taken:
        raise CheckpointError(f"there is something else at {where} already: name a folder that is new, or empty")


def _write_listed(folder: Path, name: str, data: bytes) -> None:
    """A file of a stored folder changes, and its list with it. Without an entry in between, so that there is no moment at
    which the two do not agree."""
    listed, place = folders.read_list(folder), folders.inside(folder, name)
    if listed is None:
        locations.write(place, data)
        return
    others = {each: entry for each, entry in listed.items() if each != name}
    locations.write(folder / folders.MARKER, folders.dump_list(others))
    locations.write(place, data)
    locations.write(folder / folders.MARKER, folders.dump_list({**others, name: folders.entry_of_bytes(data)}))


def unlist_metadata(folder: Path) -> None:
    """Let others write the metadata of a stored folder, who know nothing of its list."""
    listed = folders.read_list(folder) or {}
    if METADATA_FILE in listed:
        others = {name: entry for name, entry in listed.items() if name != METADATA_FILE}
        locations.write(folder / folders.MARKER, folders.dump_list(others))


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:  # a fork has a copy of the object, not of the folder
        shutil.rmtree(folder, ignore_errors=True)


def is_directory(data: bytes | memoryview) -> bool:
    """Are these the bytes of a folder (a tar archive), or of a dictionary?"""
    return bytes(data[257:262]) == b"ustar" and bytes(data[:1]) != PICKLE


def unpack(data: bytes | memoryview, target: str | Path) -> None:
    """A folder's archive into `target`, which is empty; what is no plain file below it is refused."""
    archives.unpack(data, Path(target))


def _checked(data: bytes | memoryview, where: Any, *, covered: bool = False) -> bytes:
    """These bytes, when their digest is right. Those without one are older, and get one here, so that what they become
    is not doubted again. `covered`: another digest was right, of the folder that they are in."""
    content = bytes(data)
    try:
        if digest.verify(content):
            return content
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
    if content[-1:] not in (STOP, b"\0"):  # of a pickle, and of a tar archive
        return content  # no checkpoint, or a part of one; those who read it say so
    if not covered:
        locations.warn_without_digest(where)
    return digest.sealed(content)


def _unpickled(data: bytes, where: str, trusted: bool) -> dict[str, Any]:
    if digest.is_sealed(data):
        data = data[: -digest.SEAL_BYTES]
    ours = unpickling.is_dictionary(data)
    try:
        if not ours:
            raise CheckpointError("it does not begin as a pickled dictionary does")
        if data[-1:] != STOP:
            raise CheckpointError("it was cut off, or something was added to its end")
        content = pickle.loads(data) if trusted else unpickling.read(data)
    except unpickling.Refused as error:
        raise CheckpointError(
            f"{where}: it holds {error}, and rebuilding such objects can run code from the file; plain values, arrays and "
            "tensors need none. If you made it yourself, use Checkpoint(path, trusted=True)"
        ) from error
    except ModuleNotFoundError as error:
        raise CheckpointError(f"{where}: reading it needs {error.name}, which is not installed here") from error
    except Exception as error:
        said = str(error) or type(error).__name__
        raise CheckpointError(f"{where}: not a checkpoint of a function's, or damaged ({said})") from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{where}: a checkpoint of a function's is a dictionary, this is a {type(content).__name__}"
        )
    return content
