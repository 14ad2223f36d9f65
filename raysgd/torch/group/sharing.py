"""Let one rank give its state to others, and all give each other objects and sums, by their process
group. Worker."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from raysgd.core.control import Control
from raysgd.torch.foreign import gloo_within
from raysgd.torch.state import packing

# Of one broadcast: a part that takes longer than the limit of a hang would be one, at some megabits a second. If a peer dies in one,
# gloo can forget the call of another rank (docs/design/gloo-lost-send.md), which ends then.
PIECE, PIECE_S = 4 << 20, 60.0

Part = tuple[int, int, int]  # the number of a tensor, and from where to where its bytes are meant


def share_state(
    state: Any, giver: int, *, takes: bool, models: Any = None, device: torch.device, control: Control
) -> Any:
    """Broadcast a state, which the rank `giver` has, through memory of this device. Return it where
    a rank `takes` it, and else None. All ranks call this, those with an equal state, too.

    Its tensors have memory of their own on the CPU, or, for the part `models`, that of this rank's
    states, if they are passed: then these have a part of the new ones before this returns.
    """
    layout = packing.pack(state) if dist.get_rank() == giver else None
    begin = share_bytes(b"" if layout is None else layout.begin, giver, device=device, control=control)
    _, *sizes = packing.sizes_in(begin)
    memory = [*_memory(models, sizes)] if takes else []
    content = memory if layout is None else list(map(packing.bytes_of, layout.tensors))
    with gloo_within(PIECE_S):
        _broadcast(content, sizes, giver, device=device, control=control)
    if not takes:
        return None
    result = packing.assembled(begin, memory)
    return result if models is None or _kinds(result["models"]) == _kinds(models) else copy.deepcopy(result)


def _memory(models: Any, sizes: Sequence[int]) -> Iterator[torch.Tensor]:
    """Yield memory for tensors of these sizes: first that of the models, if it fits."""
    tensors = [] if models is None else packing.pack(models).tensors
    fits = [each.nbytes for each in tensors] == sizes[: len(tensors)] and all(each.is_contiguous() for each in tensors)
    if fits:
        yield from map(packing.bytes_of, tensors)
    for size in sizes[len(tensors) if fits else 0 :]:
        yield torch.empty(size, dtype=torch.uint8, device="cpu")


def _kinds(models: Any) -> list[Any]:
    """What must be equal, in the same order, for tensors to be in each other's memory."""
    return [
        [(name, getattr(each, "dtype", 0), getattr(each, "shape", 0)) for name, each in model.items()]
        for model in models
    ]


def share_bytes(data: Any, giver: int, *, device: torch.device, control: Control) -> bytearray:
    """Broadcast bytes, and return them on all ranks."""
    size = torch.tensor([len(data)], device=device)
    with gloo_within(PIECE_S):
        dist.broadcast(size, giver)
        control.ensure_whole()
        result = bytearray(int(size))
        if dist.get_rank() == giver:
            result[:] = data
        if result:
            content = [torch.frombuffer(result, dtype=torch.uint8)]
            _broadcast(content, [len(result)], giver, device=device, control=control)
    return result


def _broadcast(
    content: Sequence[torch.Tensor],
    sizes: Sequence[int],
    giver: int,
    *,
    device: torch.device,
    control: Control,
) -> None:
    """Broadcast the bytes that `content` has on the rank `giver` to the memory that it has on
    others, where it may be empty: those of small tensors together."""
    gives, room = dist.get_rank() == giver, torch.empty(min(PIECE, sum(sizes)), dtype=torch.uint8, device=device)
    for parts in pieces(sizes):
        slices = [content[number][start:stop] for number, start, stop in parts] if content else []
        if len(slices) == 1 and slices[0].device == device:
            dist.broadcast(slices[0], giver)
        else:
            piece = room[: sum(stop - start for _, start, stop in parts)]
            places = piece.split([len(each) for each in slices]) if slices else ()
            for place, each in zip(places, slices, strict=True) if gives else ():
                place.copy_(each)
            dist.broadcast(piece, giver)
            for place, each in zip(places, slices, strict=True) if not gives else ():
                each.copy_(place)
        control.moved()
    control.ensure_whole()


def pieces(sizes: Sequence[int]) -> Iterator[list[Part]]:
    """Divide the bytes of tensors with these sizes into pieces.

    >>> [len(each) for each in pieces([5, 0, PIECE, 7])], list(pieces([0]))
    ([2, 2], [])
    """
    parts, room = list[Part](), PIECE
    for number, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(start + room, size)
            parts.append((number, start, stop))
            start, room = stop, room - (stop - start)
            if not room:
                yield parts
                parts, room = [], PIECE
    if parts:
        yield parts


def summed(values: Sequence[float], device: torch.device, control: Control) -> list[float]:
    """Compute the sums of these numbers over all ranks."""
    if not dist.is_initialized():  # an abort leaves the group known: this rank has no peers
        return list(values)
    where = "cpu" if dist.get_backend() == "gloo" else device
    together = torch.tensor(values, dtype=torch.float64, device=where)
    dist.all_reduce(together)
    control.ensure_whole()
    return [float(each) for each in together.tolist()]


def gathered_objects(value: Any, control: Control) -> list[Any]:
    """Collect every rank's object, in rank order."""
    if not dist.is_initialized():
        return [value]
    objects: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(objects, value)
    control.ensure_whole()
    return objects
