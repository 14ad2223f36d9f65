"""Let one rank give its state to others, by broadcasts of their process group. Worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from raysgd.torch.checkpoint import packing

# Of one broadcast: a part that takes longer than the limit of a hang would be one, at some megabits a second.
PIECE = 4 << 20

Part = tuple[int, int, int]  # the number of a tensor, and from where to where its bytes are meant


def share_state(state: Any, giver: int, *, takes: bool, device: torch.device, moved: Callable[[], None]) -> Any:
    """Broadcast a state, which the rank `giver` has, through memory of this device. Return it where
    a rank `takes` it, with tensors of its own on the CPU, and else None. All ranks call this, those
    with an equal state, too."""
    layout = packing.pack(state) if dist.get_rank() == giver else None
    begin = share_bytes(b"" if layout is None else layout.begin, giver, device=device, moved=moved)
    _, *sizes = packing.sizes_in(begin)
    taken = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes] if takes else []
    content = taken if layout is None else list(map(packing.bytes_of, layout.tensors))
    _broadcast(content, sizes, giver, device=device, moved=moved)
    return packing.assembled(begin, taken) if takes else None


def share_bytes(data: Any, giver: int, *, device: torch.device, moved: Callable[[], None]) -> bytearray:
    """Broadcast bytes, and return them on all ranks."""
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, giver)
    found = bytearray(int(size))
    if dist.get_rank() == giver:
        found[:] = data
    if found:
        _broadcast([torch.frombuffer(found, dtype=torch.uint8)], [len(found)], giver, device=device, moved=moved)
    return found


def _broadcast(
    content: Sequence[torch.Tensor],
    sizes: Sequence[int],
    giver: int,
    *,
    device: torch.device,
    moved: Callable[[], None],
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
        moved()


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
