"""A checkpoint of a function's: a dictionary, or a directory of files. It travels as bytes and is stored as it is."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from raysgd.errors import CheckpointError, ConfigError

__all__ = ["Checkpoint"]

METADATA_FILE = ".metadata.json"
METADATA_KEY = "_metadata"
PICKLE = b"\x80"  # how every pickle of ours begins


class Checkpoint:
    """A dictionary in memory, a file that holds one, or a directory. Immutable but for its metadata.

        train.report({"loss": 0.1}, checkpoint=Checkpoint.from_dict({"epoch": 3}))

    Dictionaries are pickled, so load only what you trust.
    """

    def __init__(self, path: str | Path) -> None:
        self._path: Path | None = Path(path)
        self._data: dict[str, Any] | None = None

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Checkpoint:
        if not isinstance(data, Mapping):
            raise ConfigError(f"Checkpoint.from_dict takes a dict, got {data!r}")
        made = cls("")
        made._path, made._data = None, dict(data)
        return made

    @classmethod
    def from_directory(cls, path: str | Path) -> Checkpoint:
        """The files stay where they are until the checkpoint is reported or copied."""
        if not Path(path).is_dir():
            raise CheckpointError(f"there is no directory {Path(path).absolute()}")
        return cls(path)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Checkpoint:
        """What `to_bytes` gave. A directory is unpacked into a temporary one."""
        if not is_directory(data):
            return cls.from_dict(_unpickled(data, "these bytes"))
        target = tempfile.mkdtemp(prefix="raysgd-checkpoint-")
        unpack(data, target)
        return cls(target)

    def to_bytes(self, *, dumps: Callable[[Any], bytes] = pickle.dumps) -> bytes:
        if self._data is not None:
            return dumps(self._data)
        assert self._path is not None
        if self._path.is_file():
            return self._path.read_bytes()
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as archive:
            archive.add(self._path, arcname=".")
        return stream.getvalue()

    def to_dict(self) -> dict[str, Any]:
        if self._data is not None:
            return dict(self._data)
        assert self._path is not None
        if self._path.is_dir():
            raise CheckpointError(f"{self._path} is a directory of files, not a dictionary: use as_directory()")
        if not self._path.is_file():
            raise CheckpointError(f"there is no checkpoint at {self._path.absolute()}")
        return _unpickled(self._path.read_bytes(), str(self._path))

    def to_directory(self, path: str | Path | None = None) -> str:
        """Copies the files to `path` (or a new temporary directory), and returns where they are."""
        if self._path is None or not self._path.is_dir():
            raise CheckpointError("this checkpoint is a dictionary, not a directory of files: use to_dict()")
        target = path or tempfile.mkdtemp(prefix="raysgd-checkpoint-")
        shutil.copytree(self._path, target, dirs_exist_ok=True)
        return str(target)

    @contextlib.contextmanager
    def as_directory(self) -> Iterator[str]:
        """The directory itself, for reading."""
        if self._path is None or not self._path.is_dir():
            raise CheckpointError("this checkpoint is a dictionary, not a directory of files: use to_dict()")
        yield str(self._path)

    @property
    def path(self) -> str | None:
        """Where it is stored; None for a dictionary in memory."""
        return None if self._path is None else str(self._path)

    def get_internal_representation(self) -> tuple[str, Any]:
        """("data_dict", the dictionary) or ("local_path", where it is stored)."""
        return ("data_dict", self._data) if self._path is None else ("local_path", str(self._path))

    # -- metadata -------------------------------------------------------------------------------------

    def get_metadata(self) -> dict[str, Any]:
        if self._path is not None and self._path.is_dir():
            file = self._path / METADATA_FILE
            return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}
        return dict(self.to_dict().get(METADATA_KEY, {}))

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replaces the metadata; they must be plain JSON."""
        text = json.dumps(dict(metadata))
        if self._data is not None:
            self._data[METADATA_KEY] = dict(metadata)
        elif self._path is not None and self._path.is_dir():
            (self._path / METADATA_FILE).write_text(text, encoding="utf-8")
        else:
            raise CheckpointError(
                "the metadata of a stored dictionary cannot be changed; from_dict(to_dict()) gives a copy"
            )

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        self.set_metadata({**self.get_metadata(), **metadata})

    def __repr__(self) -> str:
        what = f"keys {sorted(self._data)}" if self._data is not None else str(self._path)
        return f"Checkpoint({what})"


def is_directory(data: bytes | memoryview) -> bool:
    """Are these the bytes of a directory (a tar archive), or of a dictionary?"""
    return bytes(data[257:262]) == b"ustar" and bytes(data[:1]) != PICKLE


def unpack(data: bytes | memoryview, target: str | Path) -> None:
    """A directory's archive into `target`; entries that point outside are refused."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
        root = Path(target).resolve()
        for member in archive.getmembers():
            place = (root / member.name).resolve()
            if not place.is_relative_to(root) or not (member.isfile() or member.isdir()):
                raise CheckpointError(f"a checkpoint must hold plain files and directories only, not {member.name!r}")
        archive.extractall(root)


def _unpickled(data: Any, where: str) -> dict[str, Any]:
    try:
        content = pickle.loads(data)
    except Exception as error:
        raise CheckpointError(f"{where}: not a checkpoint of a function's, or damaged ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{where}: a checkpoint of a function's is a dictionary, this is a {type(content).__name__}"
        )
    return content
