"""Checkpoints that every worker writes its own part of, with `torch.distributed.checkpoint`; read by any number of
workers. All functions are called on all ranks together."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from raysgd.errors import CheckpointError
from raysgd.storage import locations
from raysgd.storage.digest import is_sealed, sealed
from raysgd.torch.checkpoint import manifest, states
from raysgd.torch.operator import TrainingOperator

__all__ = ["is_replaceable", "is_without_manifest", "read", "read_outline", "write"]

OUTLINE, INDEX = "outline.pt", ".metadata"
TENSOR = "__tensor__"
PARTS = ("models", "optimizers")


def write(folder: str, state: dict[str, Any]) -> dict[str, Any]:
    """Tensors of models and optimizers go into the parts; all else into the outline, with where each tensor belongs.
    Returns what the manifest says of this rank's files."""
    from raysgd.torch.checkpoint.shard_writer import write_parts

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

    outline = {**state, **{part: _mapped(state[part], part, take_out) for part in PARTS}}
    write_parts(tensors, folder)
    rank = dist.get_rank() if dist.is_initialized() else 0
    if rank == 0:
        locations.write(path / OUTLINE, sealed(states.dump(outline)))
    mine = {name for name in os.listdir(path) if name.startswith(f"__{rank}_")}
    return manifest.described(path, mine | ({OUTLINE, INDEX} if rank == 0 else set()))


def is_without_manifest(folder: Path) -> bool:
    """Return whether this folder was written before there were manifests. Those with one have a digest in the outline."""
    try:
        with open(folder / OUTLINE, "rb") as file:
            return not is_sealed(file)
    except OSError as error:
        raise CheckpointError(f"this is no whole checkpoint in parts: it has no {OUTLINE} ({error})") from error


def read_outline(folder: str) -> dict[str, Any]:
    """The state with empty tensors on no device: what is needed to tell whether it fits."""
    outline, known = _outline(folder), _index(folder)
    used: set[str] = set()

    def empty(key: str) -> torch.Tensor:
        if key not in known:
            raise CheckpointError(f"this is no whole checkpoint in parts: its index has no tensor {key!r:.80}")
        used.add(key)
        return torch.empty(known[key].size, dtype=known[key].properties.dtype, device="meta")

    state = {**outline, **{part: _filled(outline[part], empty) for part in PARTS}}
    if used != known.keys():
        surplus = sorted(known.keys() - used)[:4]
        raise CheckpointError(f"this is no whole checkpoint in parts: its index has unknown tensors {surplus}")
    return state


def read(folder: str, operator: TrainingOperator) -> dict[str, Any]:
    """The state, each tensor cut as this worker needs it. For an operator that it fits."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    outline, known = _outline(folder), _index(folder)
    owners = _owners(outline, operator)
    tensors: dict[str, torch.Tensor] = {}
    for key, place in known.items():
        size, dtype, owner = place.size, place.properties.dtype, owners.get(key)
        if owner is not None and hasattr(owner, "full_tensor") and owner.shape == size:
            tensors[key] = torch.zeros_like(owner, dtype=dtype, requires_grad=False)
        else:
            tensors[key] = torch.zeros(size, dtype=dtype)
    try:
        load(tensors, checkpoint_id=folder, no_dist=not dist.is_initialized())
    except CheckpointException as error:  # torch's own, on all ranks; it is no Exception
        raise CheckpointError(f"the tensors cannot be read: {_reason(error)}") from error
    return {**outline, **{part: _filled(outline[part], tensors.__getitem__) for part in PARTS}}


def _reason(error: Any) -> str:
    """Return the first rank's error: torch's text has all of them, with their tracebacks."""
    for rank, (cause, _) in sorted(error.failures.items()):
        return f"{type(cause).__name__} on rank {rank}: {cause}"
    return str(error)


def is_replaceable(folder: Path) -> bool:
    """Return whether this is a directory that holds nothing, or a checkpoint as `write` makes it, perhaps a damaged one."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {""}
    return not names or not names.isdisjoint({OUTLINE, INDEX})


def _outline(folder: str) -> dict[str, Any]:
    outline = states.parse(locations.read(Path(folder) / OUTLINE), trusted=True)
    if not isinstance(outline.get("optimizers"), list):
        raise CheckpointError(f"this is no whole checkpoint in parts: {OUTLINE} lists no optimizers")
    return outline


def _index(folder: str) -> dict[str, Any]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    try:
        known: dict[str, Any] = dict(FileSystemReader(folder).read_metadata().state_dict_metadata)
        for entry in known.values():
            if not isinstance(entry.size, torch.Size) or not isinstance(entry.properties.dtype, torch.dtype):
                raise TypeError(f"an entry is a {type(entry).__name__}")
        return known
    except Exception as error:
        raise CheckpointError(f"this is no whole checkpoint in parts: its index cannot be read ({error})") from error


def _owners(outline: dict[str, Any], operator: TrainingOperator) -> dict[str, Any]:
    """For each key, the model's tensor, or the parameter that the optimizer's tensor belongs to."""
    owners: dict[str, Any] = {}
    for number, model in enumerate(operator._parts.models):
        owners |= {f"models/{number}/{name}": value for name, value in model.state_dict().items()}
    for number, (optimizer, saved) in enumerate(zip(operator._parts.optimizers, outline["optimizers"], strict=True)):
        mine = [each for group in optimizer.param_groups for each in group["params"]]
        theirs = [each for group in saved["param_groups"] for each in group["params"]]
        for parameter, their in zip(mine, theirs, strict=True):
            names = saved["state"].get(their, {})
            owners |= {f"optimizers/{number}/state/{their}/{name}": parameter for name in names}
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
