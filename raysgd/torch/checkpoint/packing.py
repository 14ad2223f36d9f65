"""Pack a state as one pickle and the raw bytes of its tensors, for another rank or a snapshot.
Worker.

This takes a tenth of the time of `torch.save`, which writes a zip archive for other programs. A
packed state never is a file, and only ranks of the same trainer exchange it."""

from __future__ import annotations

import io
import itertools
import pickle
import struct
from typing import Any

import numpy
import torch
from torch import nn

# The number of parts, and the size of each. The first part is the pickle. Each part begins at a multiple of ALIGNED bytes.
COUNT, SIZE = struct.Struct("!Q"), struct.Struct("!Q")
ALIGNED = 64


def pack(state: Any, *, copy: bool) -> list[Any]:
    """Return a state as buffers whose bytes, one after another, are the packed state. With `copy`,
    the state may change afterwards; otherwise it shares memory with them."""
    stream, tensors = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(stream, tensors, copy).dump(state)
    parts = [memoryview(stream.getbuffer()), *(each.raw() for each in tensors)]
    head = COUNT.pack(len(parts)) + b"".join(SIZE.pack(len(part)) for part in parts)
    return [each for part in (head, *parts) for each in (part, bytes(-len(part) % ALIGNED)) if len(each)]


def packed(state: Any) -> memoryview:
    """Return a state as bytes, copied once."""
    parts = pack(state, copy=False)
    whole = memoryview(bytearray(sum(map(len, parts))))
    start = 0
    for part in parts:
        whole[start : start + len(part)] = part
        start += len(part)
    return whole


def unpack(data: Any) -> Any:
    """Return the state. Its tensors are on the CPU, and have memory of their own."""
    data = memoryview(data).cast("B")
    (count,) = COUNT.unpack_from(data)
    head = COUNT.size + count * SIZE.size
    sizes = [size for (size,) in SIZE.iter_unpack(data[COUNT.size : head])]
    starts = itertools.accumulate(map(_padded, sizes), initial=_padded(head))
    content, *tensors = [data[start : start + size] for start, size in zip(starts, sizes, strict=False)]
    return pickle.loads(content, buffers=tensors)


def _padded(size: int) -> int:
    return size + -size % ALIGNED


class _Pickler(pickle.Pickler):
    """Keeps the bytes of tensors apart. Those that share all of their memory stay one."""

    def __init__(self, stream: io.BytesIO, tensors: list[pickle.PickleBuffer], copy: bool) -> None:
        super().__init__(stream, protocol=5, buffer_callback=self._is_in_band)
        self._copy, self._tensors = copy, tensors
        self._seen: dict[Any, torch.Tensor] = {}

    def _is_in_band(self, buffer: pickle.PickleBuffer) -> bool:
        """Return whether a buffer is copied: others than tensors are, because users change them."""
        return not any(buffer is each for each in self._tensors[-1:])

    def reducer_override(self, value: Any) -> Any:
        if type(value) not in (torch.Tensor, nn.Parameter):
            return NotImplemented
        if type(value) is nn.Parameter or not _is_ordinary(value):
            if value.device.type in ("cpu", "meta"):
                return NotImplemented
            return _on_cpu(value).__reduce_ex__(5)  # the other process may not have this device
        first = self._seen.setdefault((value.data_ptr(), value.shape, value.stride(), value.dtype), value)
        if first is not value and value.numel():
            return _same, (first,)
        own = value.detach().to("cpu", copy=self._copy).contiguous()
        content: Any = own.reshape(-1).view(torch.uint8).numpy() if own.numel() else numpy.empty(0, numpy.uint8)
        self._tensors.append(pickle.PickleBuffer(content))
        return _tensor, (self._tensors[-1], value.dtype, tuple(value.shape))


def _is_ordinary(tensor: torch.Tensor) -> bool:
    """Return whether its values and shape are all that it is."""
    plain = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    return plain and not tensor.is_meta and not tensor.requires_grad and not tensor.__dict__


def _on_cpu(value: torch.Tensor) -> torch.Tensor:
    if isinstance(value, nn.Parameter):
        return nn.Parameter(value.detach().cpu(), requires_grad=value.requires_grad)
    moved = value.detach().cpu().requires_grad_(value.requires_grad)
    vars(moved).update(vars(value))
    return moved


def _tensor(content: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    if tensor.numel():
        tensor.view(-1).view(torch.uint8).numpy()[:] = numpy.frombuffer(content, numpy.uint8)
    return tensor


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()
