"""Bring batches to the device: on CUDA, the next one from pinned memory, in time. Worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from raysgd.replica.steps.feed import Carrier
from raysgd.torch.foreign import storage_uses
from raysgd.torch.registered import move
from raysgd.torch.state.packing import has_bytes

HELD = 2  # so many batches may be held by the running step and by a loop's variables


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

    Only dense tensors in plain containers are copied in advance. For others, and objects of other
    types, `.to` is called when the batch is needed, because the memory that it allocates cannot be
    registered with the stream that uses it.

    With `reuse`, a later batch gets the memory of one that nothing holds, once the device has done
    what was launched until then: the copy waits for an event. Code that uses a batch on a stream of
    its own must let the current stream wait for that before it drops the batch, so user code that
    gets the batches has none of this.
    """

    ahead = True

    def __init__(
        self, device: torch.device, *, channels_last: bool = False, streams: Any = torch.cuda, reuse: bool = True
    ) -> None:
        super().__init__(device, channels_last=channels_last)
        self._streams, self._reuse = streams, reuse and not channels_last  # which the step has a copy of
        self._stream = streams.Stream(device)
        self._free, self._arrived = deque[_Room](), deque[_Room]()

    def send(self, batch: Any) -> Any:
        room = self._free.popleft() if self._free else _Room(self._device, keeps=self._reuse)
        with self._streams.stream(self._stream):
            if room.last_use is not None:
                self._stream.wait_event(room.last_use)
            room.place = 0
            batch = _each_tensor(batch, room.copy)
            room.forget_places_behind()
            room.copied = self._stream.record_event(room.copied)
        return batch, room

    def arrived(self, sent: Any) -> Any:
        batch, room = sent
        working = self._streams.current_stream(self._device)
        working.wait_event(room.copied)
        room.register(working)
        if self._reuse:
            self._let_go(room, working)
        return super().arrived(batch)

    def _let_go(self, room: _Room, working: Any) -> None:
        self._arrived.append(room)
        if len(self._arrived) > HELD:
            earlier = self._arrived.popleft()
            if earlier.working == working and earlier.drop_held():
                earlier.last_use = working.record_event(
                    earlier.last_use
                )  # after the look: what uses it was launched before that
                self._free.append(earlier)


class _Room:
    """Memory of the device for one batch, which has tensors of its own that share it.

    keeps     whether a later batch is to have it
    tensors   by their places in the batch, with their forms and the uses of their memory while only
              this object has it
    place     of the next tensor
    new       what was allocated for the newest batch
    copied    the event after the copies
    working   the stream for which all tensors that are not new are registered
    last_use  the event after the last use
    """

    def __init__(self, device: torch.device, *, keeps: bool) -> None:
        self._device, self._keeps, self.place = device, keeps, 0
        self.tensors: dict[int, tuple[torch.Tensor, Any, Any]] = {}
        self.new: list[torch.Tensor] = []
        self.copied: Any = None
        self.working: Any = None
        self.last_use: Any = None

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided or tensor.is_nested:  # which torch cannot register with a stream
            return tensor
        source, place = _pinned(tensor), self.place
        self.place += 1
        ordinary = type(source) is torch.Tensor and source.is_cpu and not source.requires_grad and has_bytes(source)
        if ordinary and place in self.tensors:
            copy, form, _ = self.tensors[place]
            if form == _form(source):
                copy.copy_(source, non_blocking=True)
                return copy.detach()
            del copy, self.tensors[place]  # before more memory is taken
        copy = source.to(self._device, non_blocking=True)
        self.new.append(copy)
        if not (self._keeps and ordinary) or copy.is_inference():
            return copy
        self.tensors[place] = copy, _form(copy), storage_uses(copy)
        return copy.detach()

    def forget_places_behind(self) -> None:
        for place in [each for each in self.tensors if each >= self.place]:
            del self.tensors[place]

    def register(self, working: Any) -> None:
        """Register the stream that works with the batch: the memory was allocated on the one that
        copies, which must not use it again before that when it is freed."""
        if self.working not in (None, working):
            self.new.extend(copy for copy, *_ in self.tensors.values())
        for each in self.new:
            each.record_stream(working)
        self.working = working
        self.new.clear()

    def drop_held(self) -> bool:
        """Leave to its users what is still used, and return whether anything is left."""
        places = [place for place, (copy, _, alone) in self.tensors.items() if storage_uses(copy) != alone]
        for place in places:
            del self.tensors[place]
        return bool(self.tensors)


def make_carrier(device: torch.device, *, channels_last: bool, ahead: bool = True, reuse: bool = False) -> Carrier:
    if device.type == "cpu" and not channels_last:
        return Carrier()
    if device.type == "cuda" and ahead:
        return CudaCarrier(device, channels_last=channels_last, reuse=reuse)
    return DeviceCarrier(device, channels_last=channels_last)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Pin a tensor: a copy from pageable memory would wait for the device."""
    return tensor if tensor.device.type != "cpu" or tensor.is_pinned() else tensor.pin_memory()


def _form(tensor: torch.Tensor) -> Any:
    return tensor.shape, tensor.dtype, tensor.stride()


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
