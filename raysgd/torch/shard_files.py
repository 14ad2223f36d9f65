"""Checkpoints that every worker writes its own part of, with `torch.distributed.checkpoint`; read by any number of
workers. All functions are called on all ranks together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from raysgd import storage
from raysgd.errors import CheckpointError
from raysgd.torch import states
from raysgd.torch.base import OperatorBase

__all__ = ["is_replaceable", "read", "read_outline", "write"]

OUTLINE = "outline.pt"
TENSOR = "__tensor__"
PARTS = ("models", "optimizers")


def write(folder: str, state: dict[str, Any]) -> None:
    """Tensors of models and optimizers go into the parts; all else into the outline, with where each tensor belongs."""
    from raysgd.torch.shard_writer import write_parts

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
    if not dist.is_initialized() or dist.get_rank() == 0:
        storage.write(path / OUTLINE, states.dump(outline))


def read_outline(folder: str) -> dict[str, Any]:
    """The state with empty tensors on no device: what is needed to tell whether it fits."""
    outline = states.parse(storage.read(Path(folder) / OUTLINE), trusted=True)
    known = _index(folder)

    def empty(key: str) -> torch.Tensor:
        return torch.empty(known[key].size, dtype=known[key].properties.dtype, device="meta")

    return {**outline, **{part: _filled(outline[part], empty) for part in PARTS}}


def read(folder: str, operator: OperatorBase) -> dict[str, Any]:
    """The state, each tensor cut as this worker needs it. For an operator that it fits."""
    from torch.distributed.checkpoint.state_dict_loader import load

    outline = states.parse(storage.read(Path(folder) / OUTLINE), trusted=True)
    known = _index(folder)
    owners = _owners(outline, operator)
    tensors: dict[str, torch.Tensor] = {}
    for key, place in known.items():
        size, dtype, owner = place.size, place.properties.dtype, owners.get(key)
        if owner is not None and hasattr(owner, "full_tensor") and owner.shape == size:
            tensors[key] = torch.zeros_like(owner, dtype=dtype, requires_grad=False)
        else:
            tensors[key] = torch.zeros(size, dtype=dtype)
    load(tensors, checkpoint_id=folder, no_dist=not dist.is_initialized())
    return {**outline, **{part: _filled(outline[part], tensors.__getitem__) for part in PARTS}}


def is_replaceable(folder: Path) -> bool:
    """Return whether this is a directory that holds nothing, or a checkpoint as `write` makes it, perhaps a damaged one."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else {""}
    return not names or not names.isdisjoint({OUTLINE, ".metadata"})


def _index(folder: str) -> dict[str, Any]:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    try:
        return dict(FileSystemReader(folder).read_metadata().state_dict_metadata)
    except Exception as error:
        raise CheckpointError(f"this is no whole checkpoint in parts: its index cannot be read ({error})") from error


def _owners(outline: dict[str, Any], operator: OperatorBase) -> dict[str, Any]:
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
