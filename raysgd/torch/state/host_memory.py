"""Copy a state to memory of the CPU. Training waits only for that, and on a GPU not even for that.
Worker."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from raysgd.torch.state.packing import Layout

SPARE = 1 << 16


class HostMemory:
    """Owns memory for one copy, which is used again when that is released. `cuda` is `torch.cuda`
    for a GPU, or a test's substitute.

    Then the memory is pinned, and the host launches the next step while the device copies what it
    has computed so far. Nothing changes a tensor before it is copied, no optimizer, no forward pass
    and no user code, because the device copies before the next step: to other memory of its own, if
    twice as much is free, and from there beside the step. For what is on another GPU, the host
    waits."""

    def __init__(self, device: torch.device, cuda: Any = None) -> None:
        self._device, self._cuda = device, torch.cuda if device.type == "cuda" else cuda
        self._rooms: list[torch.Tensor] = []
        self.beside: Any = None  # the stream for copies to the host, once there was memory for others on the device

    def copy(self, layout: Layout) -> HostCopy:
        room = self._rooms.pop() if self._rooms else _room(0)  # no other thread takes it
        if room.numel() < layout.size:
            size = layout.size + -layout.size % SPARE + SPARE  # what is not a tensor is of another size each time
            room = _pinned(size) if self._cuda else _room(size)
        copied = self._copy(layout, room)
        return HostCopy(room, layout.size, copied, self._rooms)

    def _copy(self, layout: Layout, room: torch.Tensor) -> Any:
        """Copy, or let the device do it. Then return the event after that."""
        if not self._cuda:
            layout.copy_to(room)
            return None
        stream = self._cuda.current_stream(self._device)
        if self._cuda.mem_get_info(self._device)[0] > 2 * layout.size:  # beside what steps have needed up to now
            with suppress(torch.OutOfMemoryError):  # torch may have a limit of its own
                copies = layout.on_device(self._device)
                beside = self.beside = self.beside or self._cuda.Stream(self._device)
                for each in copies:
                    each.record_stream(beside)
                beside.wait_stream(stream)
                stream = beside
        with self._cuda.stream(stream):
            layout.copy_to(room, later=self._device)
            return stream.record_event()


class HostCopy:
    """A copy of the state: see `training.snapshots.Copied`. At the end of the `with` block, its
    memory is released."""

    def __init__(self, room: torch.Tensor, size: int, copied: Any, rooms: list[torch.Tensor]) -> None:
        self.room, self.size, self._copied, self._rooms = room, size, copied, rooms

    def __enter__(self) -> list[memoryview]:
        if self._copied is not None:
            self._copied.synchronize()
        return [self.room.numpy().data[: self.size]]

    def __exit__(self, *error: object) -> None:
        self._rooms[:] = [max([self.room, *self._rooms], key=torch.numel)]


def _room(size: int, **more: Any) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="cpu", **more)


def _pinned(size: int) -> torch.Tensor:
    try:
        return _room(size, pin_memory=True)
    except RuntimeError:  # there is not so much; the host waits for copies to other memory
        return _room(size)
