"""Describe a checkpoint without running code from it: `raysgd info PATH`. Both."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from raysgd.errors import CheckpointError
from raysgd.storage import folders
from raysgd.training.auto_checkpoint import AutoCheckpoint, CheckpointFolder

__all__ = ["describe"]

Rows = Iterator[tuple[str, str]]
# What a checkpoint of a trainer has besides the parts below.
COUNTERS = {"global_step": "steps", "epoch": "epochs", "world_size": "workers"}
PARTS = {"models", "optimizers", "schedulers", "operator", "format", "version", *COUNTERS}
LONGEST = 100


def describe(path: Path, *, tensors: bool = False) -> Rows:
    """Yield names and texts that say what is at the path. Raise CheckpointError if it is damaged, or nothing that raysgd
    wrote."""
    if path.is_dir():
        yield from _folder(path)
        return
    yield (
        "file",
        f"{_size(path.stat().st_size)}, changed {datetime.fromtimestamp(path.stat().st_mtime):%Y-%m-%d %H:%M:%S}",
    )
    if _holds(path, "state.json"):
        yield from _state(_tensorflow_state(path), "TFTrainer", tensors=tensors)
    elif _holds(path, "data.pkl"):
        yield from _torch_file(path, tensors=tensors)
    else:
        yield from _function_checkpoint(path)


def _holds(path: Path, name: str) -> bool:
    """Return whether a file is a zip archive with a member of this name, in any of its folders."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(each.rpartition("/")[2] == name for each in archive.namelist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        return False


# -- files --------------------------------------------------------------------------------------------


def _torch_file(path: Path, *, tensors: bool) -> Rows:
    from raysgd.torch.checkpoint import states
    from raysgd.torch.checkpoint.files import verified_file
    from raysgd.torch.checkpoint.zip_scan import check_content

    _, sealed = verified_file(path, trusted=True)
    yield "digest", "correct" if sealed else "none (torch.save or an older version wrote the file)"
    foreign = states.foreign_types(path)
    if foreign:
        yield "content", "is not shown, because it has more than plain values and tensors, and creating that runs code:"
        yield from (("", name) for name in foreign)
        yield "", "If you trust its author, TorchTrainer.load(path, trusted=True) loads it."
        return
    with open(path, "rb") as file:
        check_content(file, trusted=False)
    yield from _state(states.peek(path), "TorchTrainer", tensors=tensors)


def _tensorflow_state(path: Path) -> dict[str, Any]:
    from raysgd.tf import states

    return states.read(path.read_bytes(), path)


def _function_checkpoint(path: Path) -> Rows:
    from raysgd.train.checkpoint import Checkpoint

    content = Checkpoint(path).to_dict()
    yield "written by", "a training function of raysgd.train, as Checkpoint.from_dict(...)"
    yield "digest", "correct"
    for name, value in content.items():
        yield str(name), _text(value)


# -- folders ------------------------------------------------------------------------------------------


def _folder(path: Path) -> Rows:
    from raysgd.train.checkpoint import DICT_FILE

    names = {each.name for each in path.iterdir()}
    if "outline.pt" in names:
        yield from _shards(path)
    elif names & {folders.MARKER, DICT_FILE}:
        yield from _listed_folder(path)
    else:
        yield from _automatic(path)


def _shards(path: Path) -> Rows:
    from raysgd.torch.checkpoint import shard_files, states

    files = shard_files.read_manifest(path)
    yield "folder", "sharded checkpoint of a TorchTrainer, as save(sharded=True) writes it"
    if files is None:
        yield "digests", "none (an older version wrote the folder)"
    else:
        shard_files.verify(str(path), files)
        yield "digests", f"correct, of {len(files)} files, {_size(sum(entry.size for entry in files.values()))}"
    outline = states.peek(path / "outline.pt")
    yield from _state(outline, "TorchTrainer", tensors=False)


def _listed_folder(path: Path) -> Rows:
    listed = folders.read_list(path)
    folders.verify(path)
    yield "folder", "checkpoint of files, as Checkpoint.from_directory(...) of raysgd.train writes it"
    yield "digests", "none" if listed is None else f"correct, of {len(listed)} files"
    for name, entry in sorted((listed or folders.list_of(path)).items()):
        yield name, _size(entry.size)


def _automatic(path: Path) -> Rows:
    """Describe the folder that AutoCheckpoint(path=...) names. Which of the checkpoints is the best is only known with its
    `mode`, so the scores are shown."""
    found = [CheckpointFolder(AutoCheckpoint(path=path), suffix) for suffix in (".pt", ".ckpt")]
    folder = next((each for each in found if each.latest), None)
    if folder is None:
        raise CheckpointError(f"{path} has no checkpoint of raysgd")
    yield "folder", "automatic checkpoints, as AutoCheckpoint(path=...) writes them; newest first"
    for place in folder.newest_first():
        record = folder.record(place)
        score = "" if record["score"] is None else f", score {record['score']:.6g}"
        text = f"epoch {place.done}, step {place.step}{score}"
        yield place.name, text + (", damaged: its digest is wrong" if folder.is_damaged(place) else "")


# -- the state of a trainer ---------------------------------------------------------------------------


def _state(state: Mapping[str, Any], trainer: str, *, tensors: bool) -> Rows:
    older = "" if "format" in state else ", or RaySGD's, in the format of RaySGD v1"
    yield "written by", f"{trainer}.save(){older}; format version {state.get('version', 1)}"
    counts = [f"{label} {state[name]}" for name, label in COUNTERS.items() if isinstance(state.get(name), int)]
    yield "progress", ", ".join(counts) or "not saved"
    for number, model in enumerate(state["models"]):
        yield f"model {number}", _sizes(list(_arrays(model)))
        if tensors:
            yield from ((f"  {name}", _text(array)) for name, array in _arrays(model))
    for number, optimizer in enumerate(state.get("optimizers") or []):
        yield f"optimizer {number}", _optimizer(optimizer)
    for number, scheduler in enumerate(state.get("schedulers") or []):
        plain = {name: value for name, value in scheduler.items() if name[:1] != "_"}
        yield f"scheduler {number}", _text(plain)
    if state.get("operator") is not None:
        yield "operator", "state_dict(): " + _text(state["operator"])
    yield "also", ", ".join(sorted(map(str, state.keys() - PARTS))) or "nothing"


def _optimizer(state: Any) -> str:
    if not isinstance(state, Mapping) or "param_groups" not in state:
        return _sizes(list(_arrays(state)))
    groups = [
        ", ".join(
            f"{name}={value!r:.30}"
            for name, value in group.items()
            if name in ("lr", "momentum", "betas", "weight_decay")
        )
        for group in state["param_groups"]
    ]
    kinds = sorted({name for each in state.get("state", {}).values() for name in each})
    return f"{len(groups)} parameter group(s): {'; '.join(groups)}. State: {', '.join(kinds) or 'none yet'}"


def _arrays(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors and arrays in nested containers, with their names."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        yield name, value
    elif isinstance(value, (Mapping, list, tuple)):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, each in pairs:
            yield from _arrays(each, f"{name}.{key}".lstrip("."))


def _sizes(arrays: list[tuple[str, Any]]) -> str:
    if not arrays:
        return "its tensors are in the other files"
    numbers = sum(math.prod(array.shape) for _, array in arrays)
    data = sum(math.prod(array.shape) * array.dtype.itemsize for _, array in arrays)
    kinds = sorted({str(array.dtype).removeprefix("torch.") for _, array in arrays})
    return f"{numbers:,} numbers in {len(arrays)} tensors, {_size(data)}, {', '.join(kinds)}"


def _text(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        text = ", ".join(f"{key}={_text(each)}" for key, each in list(value.items())[:20])
        return f"{{{text}}}"[:LONGEST]
    return f"{value!r:.{LONGEST}}"


def _size(count: float) -> str:
    if count < 1000:
        return f"{count} bytes"
    power = min(int(math.log10(count)) // 3, 4)
    return f"{count / 1000**power:.3g} {' kMGT'[power]}B"
