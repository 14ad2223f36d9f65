"""The content that the tests of function checkpoints save and read."""

import collections
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raysgd.train import Checkpoint

numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")

LIST = ".raysgd-folder.json"


def content() -> dict[str, Any]:
    return {
        "epoch": 3,
        "table": torch.arange(300.0).reshape(20, 15),
        "tensor": torch.arange(64.0).reshape(8, 8).t(),
        "state": torch.nn.Linear(4, 3).state_dict(),
        "plain": [1, 2.5, "text", b"bytes", None, True, (1, (2, 3)), {4, 5}, 7j, collections.OrderedDict(a=1)],
    }


CONTENT = content()


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, (numpy.ndarray, torch.Tensor)):
        return bool(one.dtype == other.dtype and one.shape == other.shape and numpy.array_equal(one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def make_source(folder: Path) -> Path:
    (folder / "sub" / "empty").mkdir(parents=True)
    (folder / "weights.bin").write_bytes(bytes(range(256)) * 12)
    (folder / "sub" / "ä b").write_bytes(b"text" * 100)
    (folder / "sub" / "none").write_bytes(b"")
    Checkpoint.from_directory(folder).set_metadata({"model": "small", "numbers": list(range(30))})
    return folder


def files_of(folder: Any) -> dict[str, bytes]:
    found = {path.relative_to(folder).as_posix(): path for path in Path(folder).rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if name != LIST}


def read_folder(path: Any) -> tuple[dict[str, bytes], Any]:
    checkpoint = Checkpoint(path)
    with checkpoint.as_directory() as folder:
        return files_of(folder), checkpoint.get_metadata()


FOLDER_WAYS: dict[str, Callable[[Any, Path], Any]] = {
    "as_directory": lambda path, new: read_folder(path),
    "to_directory": lambda path, new: read_folder(Checkpoint(path).to_directory(new)),
    "to_bytes": lambda path, new: read_folder(Checkpoint.from_bytes(Checkpoint(path).to_bytes()).to_directory(new)),
    "to_uri": lambda path, new: read_folder(Checkpoint(path).to_uri(new)),
}
