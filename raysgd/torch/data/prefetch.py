"""Bring batches to the device: on CUDA, the next one from pinned memory, in time. Worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from raysgd.torch.parts import move
from raysgd.training.feed import Carrier


class DeviceCarrier(Carrier):
    """Moves batches to the model's device when they are needed."""

    def __init__(self, device: torch.device, *, channels_last: bool = False) -> None:
        self._device, self._channels_last = device, channels_last
        self._moves = device.type != "cpu"

    def arrived(self, sent: Any) -> Any:
        if self._moves:
            sent = move(sent, self._device)
        return _each_tensor(sent, _channels_last) if self._channels_last else sent


class CudaCarrier(DeviceCarrier):
    """Copies the next batch while the device works on the current one. `streams` is `torch.cuda`,
    or a test's substitute.

    Only tensors in plain containers are copied in advance. For objects of other types, their own
    `.to` is called when the batch is needed, because the memory that it allocates cannot be
    registered with the stream that uses it.
    """

    ahead = True

    def __init__(self, device: torch.device, *, channels_last: bool = False, streams: Any = torch.cuda) -> None:
        super().__init__(device, channels_last=channels_last)
        self._streams = streams
        self._own = streams.Stream(device)

    def send(self, batch: Any) -> Any:
        copies: list[torch.Tensor] = []

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            copies.append(_pinned(tensor).to(self._device, non_blocking=True))
            return copies[-1]

        with self._streams.stream(self._own):
            return _each_tensor(batch, copied), copies, self._own.record_event()

    def arrived(self, sent: Any) -> Any:
        batch, copies, event = sent
        working = self._streams.current_stream(self._device)
        working.wait_event(event)
        for tensor in copies:
            tensor.record_stream(working)  # it was allocated on the other stream, which must not reuse its memory yet
        return super().arrived(batch)


def make_carrier(device: torch.device, *, channels_last: bool, ahead: bool = True) -> Carrier:
    if device.type == "cpu" and not channels_last:
        return Carrier()
    kind = CudaCarrier if device.type == "cuda" and ahead else DeviceCarrier
    return kind(device, channels_last=channels_last)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Pin a tensor: a copy from pageable memory would wait for the device."""
    return tensor if tensor.device.type != "cpu" or tensor.is_pinned() else tensor.pin_memory()


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    images = tensor.dim() == 4 and tensor.is_floating_point()
    return tensor.contiguous(memory_format=torch.channels_last) if images else tensor


def _each_tensor(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The batch with its tensors changed, at any depth of plain containers."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if type(batch) is dict:
        return {key: _each_tensor(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_each_tensor(value, change) for value in batch))
    if type(batch) in (tuple, list):
        return type(batch)(_each_tensor(value, change) for value in batch)
    return batch
