"""Pack a state as one pickle and the raw bytes of its tensors, for another rank or a snapshot.
Worker.

This takes a tenth of the time of `torch.save`, which writes a zip archive for other programs. A
packed state never is a file, and only ranks of the same trainer exchange it."""

from __future__ import annotations

import io
import itertools
import pickle
import struct
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import nn

# The number of parts, and the size of each. The first part is the pickle. Each part begins at a multiple of ALIGNED bytes.
COUNT, SIZE = struct.Struct("!Q"), struct.Struct("!Q")
ALIGNED = 64


class Layout:
    """Where the bytes of tensors are in one buffer: behind those of `begin`, each at a multiple of
    ALIGNED bytes."""

    def __init__(self, tensors: Sequence[torch.Tensor], begin: bytes = b"") -> None:
        self.tensors, self.begin = tensors, begin
        *self._starts, self.size = itertools.accumulate(
            (_padded(each.nbytes) for each in tensors), initial=_padded(len(begin))
        )

    def copy_to(self, room: torch.Tensor, *, later: torch.device | None = None) -> None:
        """Copy the bytes to a buffer of the CPU; what is on the device `later` as soon as its
        stream does that."""
        room[: len(self.begin)].numpy()[:] = numpy.frombuffer(self.begin, numpy.uint8)
        for start, each in zip(self._starts, self.tensors, strict=True):
            if each.numel():
                room[start : start + each.nbytes].copy_(bytes_of(each), non_blocking=each.device == later)

    def on_device(self, device: torch.device) -> list[torch.Tensor]:
        """Let the tensors of this GPU be copies there. Return them."""
        copies = {number: each.detach().clone() for number, each in enumerate(self.tensors) if each.device == device}
        self.tensors = [copies.get(number, each) for number, each in enumerate(self.tensors)]
        return list(copies.values())

    def copies(self, room: torch.Tensor) -> list[torch.Tensor]:
        """The tensors that the buffer has, of which none is empty. Each has a storage of its
        own."""
        content = room.numpy().data
        return [
            torch.frombuffer(content, dtype=each.dtype, count=each.numel(), offset=start).view(each.shape)
            for start, each in zip(self._starts, self.tensors, strict=True)
        ]


def pack(state: Any) -> Layout:
    """Pack a state into bytes that were copied, and tensors that share memory with it."""
    stream, tensors = io.BytesIO(), list[torch.Tensor]()
    _Pickler(stream, tensors).dump(state)
    content = stream.getvalue()
    sizes = len(content), *(each.nbytes for each in tensors)
    head = COUNT.pack(len(sizes)) + b"".join(map(SIZE.pack, sizes))
    return Layout(tensors, head + bytes(-len(head) % ALIGNED) + content)


def packed(state: Any) -> memoryview:
    """A state as bytes, copied once."""
    layout = pack(state)
    whole = torch.empty(layout.size, dtype=torch.uint8, device="cpu")
    layout.copy_to(whole)
    return whole.numpy().data


def unpack(data: Any) -> Any:
    """Read the state. Its tensors are on the CPU, and have memory of their own."""
    data = memoryview(data).cast("B")
    sizes = sizes_in(data)
    starts = itertools.accumulate(map(_padded, sizes), initial=_padded(COUNT.size + len(sizes) * SIZE.size))
    content, *tensors = [data[start : start + size] for start, size in zip(starts, sizes, strict=False)]
    return pickle.loads(content, buffers=tensors)


def assembled(begin: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Read the state whose layout has this `begin`, with tensors in the memory of these, which are
    bytes on the CPU."""
    return pickle.loads(memoryview(begin)[-sizes_in(begin)[0] :], buffers=tensors)


def sizes_in(data: Any) -> list[int]:
    """The sizes of the pickle and of each tensor."""
    (count,) = COUNT.unpack_from(data)
    return [size for (size,) in SIZE.iter_unpack(memoryview(data)[COUNT.size : COUNT.size + count * SIZE.size])]


def _padded(size: int) -> int:
    return size + -size % ALIGNED


class _Pickler(pickle.Pickler):
    """Keeps tensors apart. Those that share all of their memory stay one."""

    def __init__(self, stream: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(stream, protocol=5, buffer_callback=lambda buffer: buffer is not self._apart)
        self._apart = pickle.PickleBuffer(bytearray())  # others are copied, because users change them
        self._tensors = tensors
        self._seen: dict[Any, torch.Tensor] = {}

    def reducer_override(self, value: Any) -> Any:
        if type(value) not in (torch.Tensor, nn.Parameter):
            return NotImplemented
        if type(value) is nn.Parameter or not is_ordinary(value):
            if value.device.type in ("cpu", "meta"):
                return NotImplemented
            return _on_cpu(value).__reduce_ex__(5)  # the other process may not have this device
        first = self._seen.setdefault((value.data_ptr(), value.shape, value.stride(), value.dtype), value)
        if first is not value and value.numel():
            return _same, (first,)
        self._tensors.append(value)
        return _tensor, (self._apart, value.dtype, tuple(value.shape))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's values, in its own memory if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def has_bytes(tensor: torch.Tensor) -> bool:
    """Whether the bytes in its memory are its values."""
    strange = tensor.is_nested or tensor.is_quantized or tensor.is_meta or tensor.is_conj() or tensor.is_neg()
    return tensor.layout is torch.strided and not strange


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether its values and shape are all that it is."""
    return has_bytes(tensor) and not tensor.requires_grad and not tensor.__dict__


def _on_cpu(value: torch.Tensor) -> torch.Tensor:
    if isinstance(value, nn.Parameter):
        return nn.Parameter(value.detach().cpu(), requires_grad=value.requires_grad)
    moved = value.detach().cpu().requires_grad_(value.requires_grad)
    vars(moved).update(vars(value))
    return moved


def _tensor(content: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if isinstance(content, torch.Tensor):
        return content.view(dtype).view(shape) if content.numel() else torch.empty(shape, dtype=dtype, device="cpu")
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    if tensor.numel():
        tensor.view(-1).view(torch.uint8).numpy()[:] = numpy.frombuffer(content, numpy.uint8)
    return tensor


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()
