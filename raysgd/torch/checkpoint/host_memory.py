"""Copy a state to memory of the CPU. Training waits only for that, and on a GPU not even for that.
Worker."""

from __future__ import annotations

from typing import Any

import torch

from raysgd.torch.checkpoint.packing import Layout


class HostMemory:
    """Owns memory for one copy, which is used again when that is released. `cuda` is `torch.cuda`
    for a GPU, or a test's substitute.

    Then the memory is pinned: the device copies what it has computed so far, and computes the next
    step after that, while the host launches it. So nothing changes a tensor before it is copied: no
    optimizer, no buffer of a forward pass, and no user code."""

    def __init__(self, device: torch.device, cuda: Any = None) -> None:
        self._device, self._cuda = device, torch.cuda if device.type == "cuda" else cuda
        self._kept: list[torch.Tensor] = []

    def copy(self, layout: Layout) -> HostCopy:
        room = self._kept.pop() if self._kept else _room(0)  # no other thread takes it
        if room.numel() < layout.size:
            room = _pinned(layout.size) if self._cuda else _room(layout.size)
        layout.copy_to(room, non_blocking=bool(self._cuda))
        copied = self._cuda.current_stream(self._device).record_event() if self._cuda else None
        return HostCopy(room, layout.size, copied, self._kept)


class HostCopy:
    """A copy of the state: see `training.snapshots.Copied`. At the end of the `with` block, its
    memory is released."""

    def __init__(self, room: torch.Tensor, size: int, copied: Any, kept: list[torch.Tensor]) -> None:
        self.room, self.size, self._copied, self._kept = room, size, copied, kept

    def __enter__(self) -> list[memoryview]:
        if self._copied is not None:
            self._copied.synchronize()
        return [self.room.numpy().data[: self.size]]

    def __exit__(self, *error: object) -> None:
        self._kept[:] = [max([self.room, *self._kept], key=torch.numel)]


def _room(size: int, **more: Any) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu", **more)


def _pinned(size: int) -> torch.Tensor:
    try:
        return _room(size, pin_memory=True)
    except RuntimeError:  # there is not so much; the host waits for copies to other memory
        return _room(size)
