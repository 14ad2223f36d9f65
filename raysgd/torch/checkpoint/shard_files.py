"""Save and load sharded checkpoints, of which each rank writes its own part, with `torch.distributed.checkpoint`. Both.

A folder contains the tensors of models and optimizers in the files of each rank, torch's index of them (`.metadata`), all
other content in the outline (`outline.pt`), and the manifest (`raysgd.json`): the size and digest of each file, written
last. Any number of workers can load it.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from raysgd.errors import CheckpointError, causes_of
from raysgd.storage import locations
from raysgd.storage.digest import is_sealed, sealed
from raysgd.storage.folders import FileEntry, entry_of
from raysgd.torch.checkpoint import states
from raysgd.torch.operator import TrainingOperator

__all__ = ["Files", "is_replaceable", "read", "read_manifest", "read_outline", "verify", "write", "write_manifest"]

OUTLINE, INDEX, MANIFEST = "outline.pt", ".metadata", "raysgd.json"
FORMAT, VERSION = "raysgd-torch-sharded", 1
LARGEST_MANIFEST = 64 << 20
TENSOR = "__tensor__"
PARTS = ("models", "optimizers", "averages")
INCOMPLETE = "not a complete sharded checkpoint"
Files = dict[str, FileEntry]

# -- the manifest: on the driver, except for `verify` --------------------------------------------------


def write_manifest(folder: Path, files: Files) -> None:
    """Write the manifest of a folder, with the entries that the ranks returned. Others are computed here."""
    others = _names(folder) - files.keys()
    entries = {**files, **{name: entry_of(folder / name) for name in others}}
    listed = {name: {"size": entry.size, "sha256": entry.digest} for name, entry in entries.items()}
    content = {"format": FORMAT, "version": VERSION, "files": listed}
    locations.write(folder / MANIFEST, json.dumps(content, indent=1, sort_keys=True).encode())


def read_manifest(folder: Path) -> Files | None:
    """Return the entries of a folder's manifest, or None for a folder of a version that wrote no manifest. Raise
    CheckpointError for a link, for a file that is missing, unknown or of another size, and for anything but files."""
    names = _names(folder)
    if not (folder / MANIFEST).exists():
        if _is_from_older_version(folder):
            return None
        raise CheckpointError(f"{INCOMPLETE}: {MANIFEST}, which lists its files, is missing")
    files = _parsed(folder)
    missing, unknown = sorted(files.keys() - names), sorted(names - files.keys())
    if missing or unknown:
        raise CheckpointError(
            f"{INCOMPLETE}: the folder has other files than {MANIFEST} lists: missing {missing[:4] or 'none'}, "
            f"unknown {unknown[:4] or 'none'}"
        )
    for name, entry in files.items():
        size = (folder / name).stat().st_size
        if size != entry.size:
            raise CheckpointError(f"{name} is damaged: it has {size} bytes, and had {entry.size} when it was saved")
    return files


def verify(folder: str, files: Files) -> None:
    """Raise CheckpointError unless these files have the sizes and digests in the manifest."""
    for name, entry in files.items():
        try:
            found = entry_of(Path(folder) / name)
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read ({error})") from error
        if found != entry:
            raise CheckpointError(
                f"{name} is damaged: its content does not have the digest that was saved with it. Use another copy of it, "
                "or an older checkpoint"
            )


def is_replaceable(folder: Path) -> bool:
    """Return whether this is an empty directory, or one with a sharded checkpoint, which may be damaged."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {""}
    return not names or not names.isdisjoint({OUTLINE, INDEX})


def _names(folder: Path) -> set[str]:
    """Return the names of the files in a folder, without the manifest."""
    with os.scandir(folder) as entries:
        found = {entry.name: entry.stat(follow_symlinks=False).st_mode for entry in entries}
    for name, mode in found.items():
        if not stat.S_ISREG(mode):
            raise CheckpointError(
                f"{name} in the folder is a link, a folder or a device: a sharded checkpoint has only files. Remove it"
            )
    return found.keys() - {MANIFEST}


def _parsed(folder: Path) -> Files:
    try:
        with open(folder / MANIFEST, "rb") as file:
            content = json.loads(file.read(LARGEST_MANIFEST))
        if content["format"] != FORMAT or content["version"] != VERSION:
            raise CheckpointError(f"{MANIFEST} is damaged, or this version of raysgd cannot read it")
        files = {name: FileEntry(listed.pop("size"), listed.pop("sha256")) for name, listed in content["files"].items()}
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{MANIFEST} is damaged: it is not a list of files ({type(error).__name__})") from error
    for name, entry in files.items():
        known = type(entry.size) is int and isinstance(entry.digest, str) and not content["files"][name]
        if not known or os.path.basename(name) != name:
            raise CheckpointError(f"{MANIFEST} is damaged: it lists {name!r:.60} with {asdict(entry)!r:.60}")
    return files


def _is_from_older_version(folder: Path) -> bool:
    """Return whether the outline has no digest, which the first versions with a manifest added to it."""
    try:
        with open(folder / OUTLINE, "rb") as file:
            return not is_sealed(file)
    except OSError as error:
        raise CheckpointError(f"{INCOMPLETE}: it has no {OUTLINE} ({error})") from error


# -- the content: workers, on all ranks together -------------------------------------------------------


def write(folder: str, state: dict[str, Any]) -> Files:
    """Write this rank's part of the tensors, and on rank 0 the outline. Return the entries of the files written here."""
    path = Path(folder)
    if not path.is_dir():
        raise CheckpointError(
            f"this worker does not see {folder}: save(sharded=True) needs a file system that all workers and "
            "the driver share"
        )
    tensors: dict[str, torch.Tensor] = {}

    def take_out(key: str, value: torch.Tensor) -> dict[str, str]:
        tensors[key] = value
        return {TENSOR: key}

    outline = {**state, **{part: _mapped(state[part], part, take_out) for part in PARTS if part in state}}
    _write_tensors(tensors, folder)
    rank = dist.get_rank() if dist.is_initialized() else 0
    written = {name for name in os.listdir(path) if name.startswith(f"__{rank}_")}
    if rank == 0:
        locations.write(path / OUTLINE, sealed(states.dump(outline)))
        written |= {OUTLINE, INDEX}
    return {name: entry_of(path / name) for name in sorted(written)}


def _write_tensors(tensors: dict[str, Any], folder: str) -> None:
    """Write this rank's tensors. Raise an OSError, on all ranks, if the system of any rank refused to write, and a
    CheckpointError for any other failure."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    class _ShardWriter(FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            try:
                return super().write_data(plan, planner)
            except Exception as error:
                for cause in causes_of(error):
                    if isinstance(cause, OSError) and cause.errno is not None:
                        raise cause from None  # torch's writer raises another error because of it
                raise

    try:
        save(tensors, storage_writer=_ShardWriter(folder), no_dist=not dist.is_initialized())
    except CheckpointException as failed:  # not an Exception; all ranks raise the same one
        rank, error = min((rank, wrapped[0]) for rank, wrapped in failed.failures.items())
        where = f"rank {rank} could not write its part of the checkpoint"
        if isinstance(error, OSError) and error.errno in errno.errorcode:
            raise OSError(error.errno, f"{error.strerror} ({where})", folder) from error
        raise CheckpointError(f"{where}: {type(error).__name__}: {error}") from error


def read_outline(folder: str) -> dict[str, Any]:
    """Return the state with tensors on the "meta" device, to check whether it fits."""
    outline, index = _outline(folder), _index(folder)
    used: set[str] = set()

    def empty(key: str) -> torch.Tensor:
        if key not in index:
            raise CheckpointError(f"{INCOMPLETE}: its index has no tensor {key!r:.80}")
        used.add(key)
        return torch.empty(index[key].size, dtype=index[key].properties.dtype, device="meta")

    state = {**outline, **{part: _filled(outline[part], empty) for part in PARTS if part in outline}}
    if used != index.keys():
        raise CheckpointError(f"{INCOMPLETE}: its index has unknown tensors {sorted(index.keys() - used)[:4]}")
    return state


def read(folder: str, operator: TrainingOperator) -> dict[str, Any]:
    """Return the state, with each tensor sharded as this operator needs it. The state must fit the operator."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    outline = _outline(folder)
    owners = _owners(outline, operator)
    tensors: dict[str, torch.Tensor] = {}
    for key, entry in _index(folder).items():
        size, dtype, owner = entry.size, entry.properties.dtype, owners.get(key)
        if owner is not None and hasattr(owner, "full_tensor") and owner.shape == size:
            tensors[key] = torch.zeros_like(owner, dtype=dtype, requires_grad=False)
        else:
            tensors[key] = torch.zeros(size, dtype=dtype)
    try:
        load(tensors, checkpoint_id=folder, no_dist=not dist.is_initialized())
    except CheckpointException as error:  # not an Exception; all ranks raise the same one
        # Its own text has the errors of all ranks, with their tracebacks.
        reasons = [
            f"{type(cause).__name__} on rank {rank}: {cause}" for rank, (cause, _) in sorted(error.failures.items())
        ]
        raise CheckpointError(f"the tensors cannot be read: {[*reasons, str(error)][0]}") from error
    return {**outline, **{part: _filled(outline[part], tensors.__getitem__) for part in PARTS if part in outline}}


def _outline(folder: str) -> dict[str, Any]:
    outline = states.parse(locations.read(Path(folder) / OUTLINE), trusted=True)
    if not isinstance(outline.get("optimizers"), list):
        raise CheckpointError(f"{INCOMPLETE}: {OUTLINE} lists no optimizers")
    return outline


def _index(folder: str) -> dict[str, Any]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    try:
        index: dict[str, Any] = dict(FileSystemReader(folder).read_metadata().state_dict_metadata)
        for entry in index.values():
            if not isinstance(entry.size, torch.Size) or not isinstance(entry.properties.dtype, torch.dtype):
                raise TypeError(f"an entry is a {type(entry).__name__}")
        return index
    except Exception as error:
        raise CheckpointError(f"{INCOMPLETE}: its index cannot be read ({error})") from error


def _owners(outline: dict[str, Any], operator: TrainingOperator) -> dict[str, Any]:
    """Return, for each key, the model's tensor, or the parameter that the optimizer's tensor belongs to."""
    owners: dict[str, Any] = {}
    for number, model in enumerate(operator._parts.models):
        for part in ("models", "averages"):
            owners |= {f"{part}/{number}/{name}": value for name, value in model.state_dict().items()}
    for number, (optimizer, saved) in enumerate(zip(operator._parts.optimizers, outline["optimizers"], strict=True)):
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        keys = [each for group in saved["param_groups"] for each in group["params"]]
        for parameter, key in zip(parameters, keys, strict=True):
            owners |= {f"optimizers/{number}/state/{key}/{name}": parameter for name in saved["state"].get(key, {})}
    return owners


def _mapped(value: Any, key: str, change: Callable[[str, torch.Tensor], Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(key, value)
    if isinstance(value, dict):
        return {name: _mapped(each, f"{key}/{name}", change) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(each, f"{key}/{place}", change) for place, each in enumerate(value))
    return value


def _filled(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {TENSOR}:
            return tensor(value[TENSOR])
        return {name: _filled(each, tensor) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_filled(each, tensor) for each in value)
    return value
