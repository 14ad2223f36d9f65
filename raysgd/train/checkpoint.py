"""The checkpoint of a training function: a dictionary, or a folder of files. Both."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import tempfile
import weakref
import zipfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from raysgd.core.lazy import load
from raysgd.errors import CheckpointError, ConfigError
from raysgd.storage import checksums, folders, locations, remote
from raysgd.storage.locations import Place
from raysgd.storage.masking import mask
from raysgd.storage.remote import Uri

METADATA_FILE = ".metadata.json"
METADATA_KEY = "_metadata"
DICT_FILE = ".raysgd-dictionary.pt"
PICKLED = "dictionary.pkl"  # the member of a zip archive without torch, which has a checksum
RAY_TRAIN = b"\x80"  # how the files of Ray Train 1.x begin


class Checkpoint:
    """A dictionary in memory, a file that holds a dictionary, or a folder of files, on this machine
    or under a URI.

    Immutable, except for its metadata. A stored checkpoint has checksums, which are verified when
    it is read: a file that is damaged or was changed raises a CheckpointError.

        train.report({"loss": 0.1}, checkpoint=Checkpoint.from_dict({"epoch": 3}))
        Checkpoint("s3://bucket/run_001/checkpoints/checkpoint_000003").to_dict()

    Dictionaries are stored with `torch.save`, and reading one of plain values and tensors runs no
    code from it. To read objects of other types, or a dictionary that Ray Train 1.x stored, or
    raysgd without torch, from the file or folder at `path`, which you trust, pass `trusted=True`.
    """

    _place: Place | None
    _data: dict[str, Any] | None
    _trusted: bool
    _added: Mapping[str, bytes] = {}  # files that are packed with those of a folder

    def __init__(self, path: str | Path | Uri, *, trusted: bool = False) -> None:
        self._place, self._data, self._trusted = locations.usable_place(path), None, trusted

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Checkpoint:
        """Make a checkpoint of the dictionary `data`, in memory."""
        if not isinstance(data, Mapping):
            raise ConfigError(f"Checkpoint.from_dict takes a dict, got {data!r}")
        checkpoint = cls.__new__(cls)
        checkpoint._place, checkpoint._data, checkpoint._trusted = None, dict(data), True
        return checkpoint

    @classmethod
    def from_directory(cls, path: str | Path, *, trusted: bool = False) -> Checkpoint:
        """Make a checkpoint of the files in the directory `path`, which may be `trusted`. They are
        copied when it is reported or stored."""
        if not Path(path).is_dir():
            raise CheckpointError(f"there is no directory {Path(path).absolute()}")
        return cls(path, trusted=trusted)

    @classmethod
    def from_uri(cls, uri: str | Path | Uri, *, trusted: bool = False) -> Checkpoint:
        """Open the checkpoint at `uri`, such as `s3://bucket/name`, `file:///folder/name`, or a
        path, without copying it. It may be `trusted`."""
        checkpoint = cls(uri, trusted=trusted)
        if not checkpoint._stored().exists():
            raise CheckpointError(
                f"there is no complete checkpoint at {mask(str(uri))}: neither a file, nor a completely written folder"
            )
        return checkpoint

    @classmethod
    def from_bytes(cls, data: bytes | memoryview, *, trusted: bool = False) -> Checkpoint:
        """Unpack the checkpoint that `to_bytes` packed into `data`. A folder is unpacked into a
        temporary one, which this object owns. `trusted`: read objects of any type."""
        if not is_directory(data):
            return cls.from_dict(_read(data, "these bytes", trusted))
        target = tempfile.mkdtemp(prefix="raysgd-checkpoint-")
        checkpoint = cls(target, trusted=trusted)
        weakref.finalize(checkpoint, _remove, target, os.getpid())
        folders.unpack(bytes(data), Path(target))
        return checkpoint

    @classmethod
    def from_checkpoint(cls, other: Checkpoint) -> Checkpoint:
        """Make an object of this class from the checkpoint `other`."""
        checkpoint = cls.__new__(cls)
        vars(checkpoint).update(vars(other), _other=other)  # which may own a temporary folder
        return checkpoint

    def to_bytes(self, *, pickler: Any = pickle.Pickler) -> bytes:
        """Pack the checkpoint into bytes: a dictionary, which the class `pickler` pickles, or a tar
        archive of the files."""
        if self._data is not None:
            return dump_dictionary(self._data, pickler)
        if not self._is_folder():
            data, where = locations.read(self._stored()), self._stored()
            return data if _is_whole(data, where) else dump_dictionary(self.to_dict(), pickler)
        with self._folder() as folder:
            return folders.pack(folder, self._added)

    def checked_bytes(self, *, pickler: Any = pickle.Pickler) -> bytes:
        """Make these bytes for receivers that trust them, or raise an error here."""
        data = self.to_bytes(pickler=pickler)
        if self._place is not None and not is_directory(data):
            _read(data, str(self._place), self._trusted)
        elif self._is_folder() and self._has(DICT_FILE):
            self.to_dict()
        return data

    def to_dict(self) -> dict[str, Any]:
        """Read the dictionary. Raise CheckpointError for a folder of files."""
        if self._data is not None:
            return dict(self._data)
        where = self._stored()
        if not self._is_folder():
            return _read(locations.read(where), str(where), self._trusted)
        if not self._has(DICT_FILE):
            raise CheckpointError(f"{where} is a folder of files, not a dictionary: use as_directory()")
        return _read(self._listed(DICT_FILE), str(where / DICT_FILE), self._trusted)

    def _has(self, name: str) -> bool:
        where = self._stored()
        return name in remote.listed(where) if isinstance(where, Uri) else (where / name).is_file()

    def _listed(self, name: str) -> bytes:
        """Read the content of a file in the folder, verified against its list."""
        where = self._stored()
        if isinstance(where, Uri):
            with tempfile.TemporaryDirectory(prefix="raysgd-checkpoint-") as local:
                remote.fetch(where, name, remote.listed(where), Path(local))
                return (Path(local) / name).read_bytes()
        data, listed = locations.read(folders.inside(where, name)), folders.read_list(where) or {}
        folders.check_entry(where, name, folders.entry_of_bytes(data), listed)
        return data

    def to_directory(self, path: str | Path | None = None) -> str:
        """Copy the files to `path`, or to a new temporary directory, and return it. A dictionary
        becomes one file, which `from_directory(...).to_dict()` reads."""
        target = Path(path or tempfile.mkdtemp(prefix="raysgd-checkpoint-"))
        entries = self._copy_to(target)
        locations.write(target / folders.MARKER, folders.dump_list(entries))
        return str(target)

    def _copy_to(self, target: Path) -> dict[str, folders.FileEntry]:
        if self._is_folder():
            with self._folder() as folder:
                target.mkdir(parents=True, exist_ok=True)
                return folders.copy(folder, target)
        data = self.to_bytes()
        locations.write(target / DICT_FILE, data)
        return {DICT_FILE: folders.entry_of_bytes(data)}

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        """A context with a directory to read the files from: the original, or a temporary copy."""
        if self._is_folder():
            with self._folder() as folder:
                folders.verify(folder)
                yield str(folder)
            return
        with tempfile.TemporaryDirectory(prefix="raysgd-checkpoint-") as copy:
            self._copy_to(Path(copy))
            yield copy

    def _folder(self) -> contextlib.AbstractContextManager[Path]:
        return locations.folder(self._stored())

    def to_uri(self, uri: str | Path | Uri) -> str:
        """Store the checkpoint at `uri`, completely or not at all, and return the URI. A dictionary
        becomes one object or file. A folder must be new or empty; under a URI it may also hold an
        earlier checkpoint."""
        where = locations.place_to_save(uri)
        if not self._is_folder():
            locations.check_file(where)
            locations.write(where, self.to_bytes())
        else:
            locations.check_folder(where)
            _check_free(where)
            with self._folder() as folder, locations.draft_folder(where) as draft:
                folders.copy(folder, draft)
        return locations.text_of(uri) if isinstance(uri, Uri) else str(uri)

    @property
    def path(self) -> str | None:
        """The path or URI where it is stored, or None for a dictionary in memory. A URI includes
        its password or token, which messages and `repr` mask with `***`."""
        return None if self._place is None else locations.text_of(self._place)

    @property
    def uri(self) -> str | None:
        """The URI where it is stored, `file://...` for a path, or None for a dictionary in
        memory."""
        return self._place.absolute().as_uri() if isinstance(self._place, Path) else self.path

    def get_internal_representation(self) -> tuple[str, Any]:
        """One of ("data_dict", the dictionary), ("local_path", the path) and ("uri", the URI)."""
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
        """Read the metadata, by default an empty dict."""
        if not self._is_folder():
            where, value = "the checkpoint", self.to_dict().get(METADATA_KEY, {})
        else:
            where, value = f"{self._stored() / METADATA_FILE}", {}
            if self._has(METADATA_FILE):
                try:
                    value = json.loads(self._listed(METADATA_FILE))
                except (ValueError, RecursionError) as error:
                    raise CheckpointError(f"{where} is damaged: it is not JSON ({error})") from error
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{where} is damaged: metadata must be a dictionary, found a {type(value).__name__}")
        return dict(value)

    @property
    def can_have_metadata(self) -> bool:
        """Whether metadata can be set: not for a stored dictionary, and not under a URI."""
        return self._data is not None or (isinstance(self._place, Path) and self._is_folder())

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replace the metadata by `metadata`, which must be plain JSON."""
        text = json.dumps(dict(metadata))
        if self._data is not None:
            self._data[METADATA_KEY] = dict(metadata)
        elif self.can_have_metadata:
            _write_listed(Path(locations.text_of(self._stored())), METADATA_FILE, text.encode())
        else:
            raise CheckpointError(
                f"the metadata of the checkpoint at {self._place} cannot be changed; from_dict(to_dict()), or "
                "from_directory(to_directory()), gives a copy whose metadata can be changed"
            )

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Add `metadata` to the metadata."""
        self.set_metadata({**self.get_metadata(), **metadata})

    def __repr__(self) -> str:
        what = f"keys {sorted(map(str, self._data))}" if self._data is not None else self._place
        return f"Checkpoint({what})"


def _check_free(where: Place) -> None:
    """Raise CheckpointError if there are other files already, because these must not be deleted."""
    if isinstance(where, Uri):
        is_taken = not where.is_dir() and (where.is_file() or bool(locations.names(where)))
    else:
        is_taken = where.is_file() or (where.is_dir() and any(where.iterdir()))
    if is_taken:
        raise CheckpointError(f"there is something else at {where} already: use a new or empty folder")


def _write_listed(folder: Path, name: str, data: bytes) -> None:
    """Change a file of a stored folder, and its entry in the list. The entry is removed in between,
    so that the file and the list never disagree."""
    listed, place = folders.read_list(folder), folders.inside(folder, name)
    if listed is None:
        locations.write(place, data)
        return
    others = {each: entry for each, entry in listed.items() if each != name}
    locations.write(folder / folders.MARKER, folders.dump_list(others))
    locations.write(place, data)
    locations.write(folder / folders.MARKER, folders.dump_list({**others, name: folders.entry_of_bytes(data)}))


def unlist_metadata(folder: Path) -> None:
    """Remove the metadata from the list of a stored folder, so that Ray can change them."""
    listed = folders.read_list(folder) or {}
    if METADATA_FILE in listed:
        others = {name: entry for name, entry in listed.items() if name != METADATA_FILE}
        locations.write(folder / folders.MARKER, folders.dump_list(others))


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:  # a forked process has a copy of the object, but not of the folder
        shutil.rmtree(folder, ignore_errors=True)


# -- dictionaries as bytes ----------------------------------------------------------------------------


class _NeedsTrustError(CheckpointError):
    """The bytes hold something that only code in them can make."""


def dump_dictionary(data: dict[str, Any], pickler: Any) -> bytes:
    """Store a dictionary as bytes, with their checksums: with `torch.save`, or pickled if torch is
    not installed. `pickler` is a class that pickles."""
    buffer = io.BytesIO()
    if find_spec("torch") is None:
        pickler(content := io.BytesIO()).dump(data)
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr(zipfile.ZipInfo(PICKLED), content.getbuffer())
        return buffer.getvalue()
    import torch

    chosen = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        torch.save(data, buffer, pickle_module=SimpleNamespace(Pickler=pickler, __name__="pickle"))
    finally:
        torch.serialization.set_crc32_options(chosen)
    return buffer.getvalue()


def _load(data: Any, *, trusted: bool) -> Any:
    """Load what `dump_dictionary` or Ray Train 1.x stored. Raise CheckpointError if the bytes are
    damaged, `_NeedsTrustError` if they are not `trusted` and would run code, and any error for what
    is neither."""
    if bytes(data[:1]) == RAY_TRAIN:
        if not trusted:
            raise _NeedsTrustError("a pickle, as Ray Train 1.x stores dictionaries")
        return pickle.loads(data)
    checksums.verify(data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        pickled = archive.read(PICKLED) if PICKLED in archive.namelist() else None
    if pickled is not None:
        if not trusted:
            raise _NeedsTrustError("a pickle, as raysgd stores dictionaries where torch is not installed")
        return pickle.loads(pickled)
    import torch

    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=not trusted)
    except pickle.UnpicklingError as error:  # the file is not damaged
        if trusted:
            raise
        names = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(data)))
        raise _NeedsTrustError(f"objects other than plain values and tensors ({names or error})") from error


def is_directory(data: bytes | memoryview) -> bool:
    """Whether these are the bytes of a folder (a tar archive), not of a dictionary."""
    return bytes(data[257:262]) == b"ustar" and bytes(data[:2]) != checksums.ZIP and bytes(data[:1]) != RAY_TRAIN


def _is_whole(data: bytes, where: Any) -> bool:
    """Verify a stored dictionary's checksums. Return False for Ray Train 1.x's, which have none."""
    try:
        return checksums.verify(data)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error


def _read(data: bytes | memoryview, where: str, trusted: bool) -> dict[str, Any]:
    """Read the dictionary that was stored, by us or by Ray Train 1.x, which pickled it."""
    try:
        content = _load(data, trusted=trusted)
    except _NeedsTrustError as error:
        raise CheckpointError(
            f"{where}: it holds {error}, and reading that can run code from the file, which plain values and tensors do not. "
            "If you trust the file, use Checkpoint(path, trusted=True)"
        ) from error
    except ModuleNotFoundError as error:
        raise CheckpointError(f"{where}: reading it needs {error.name}, which is not installed here") from error
    except Exception as error:  # a pickle can raise anything
        text = str(error) or type(error).__name__
        raise CheckpointError(f"{where}: not a checkpoint of a training function, or damaged ({text})") from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{where}: the checkpoint of a training function is a dictionary, found a {type(content).__name__}"
        )
    return content


def __getattr__(name: str) -> Any:
    """Find names of `ray.train.checkpoint` that are elsewhere, without an import of them here."""
    homes = {
        "CheckpointManager": "raysgd.train.run.checkpoint_manager",
        "CheckpointStrategy": "raysgd.train.settings",
        "TuneCheckpointManager": "raysgd.compat.without_effect",
    }
    return load("raysgd.train.checkpoint", name, homes)
