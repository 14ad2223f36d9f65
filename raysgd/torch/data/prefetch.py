"""How batches reach the device: from pinned memory, on a stream of their own, one batch ahead of the work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from raysgd.torch.data.sources import Drawn
from raysgd.torch.parts import move

__all__ = ["Ahead", "Carrier", "CudaCarrier", "make_carrier"]


class Carrier:
    """Takes batches to where models are. `send` begins, `arrived` is asked for when the batch is needed."""

    ahead = False

    def __init__(self, device: torch.device, *, channels_last: bool = False) -> None:
        self._device, self._channels_last = device, channels_last
        self._moves = device.type != "cpu"

    def send(self, batch: Any) -> Any:
        return batch

    def arrived(self, sent: Any) -> Any:
        if self._moves:
            sent = move(sent, self._device)
        return _each_tensor(sent, _channels_last) if self._channels_last else sent


class CudaCarrier(Carrier):
    """Copies beside the running work. `streams` is torch.cuda, or a double of it.

    Only tensors in plain containers go ahead; things of other types have a `.to` of their own, which is called when
    the batch is needed, since what it allocates cannot be told to the stream that uses it.
    """

    ahead = True

    def __init__(self, device: torch.device, *, channels_last: bool = False, streams: Any = torch.cuda) -> None:
        super().__init__(device, channels_last=channels_last)
        self._streams = streams
        self._own = streams.Stream(device)

    def send(self, batch: Any) -> Any:
        pinned = _each_tensor(batch, _pinned)
        with self._streams.stream(self._own):
            copied = _each_tensor(pinned, lambda tensor: tensor.to(self._device, non_blocking=True))
            return copied, self._own.record_event()

    def arrived(self, sent: Any) -> Any:
        copied, event = sent
        working = self._streams.current_stream(self._device)
        working.wait_event(event)

        def claim(tensor: torch.Tensor) -> torch.Tensor:
            tensor.record_stream(working)  # allocated on the other stream: not to be given out again before use here
            return tensor

        return super().arrived(_each_tensor(copied, claim))


class Ahead:
    """An iterator of `Drawn` that holds one more than it has given: its copy is on its way, and whether there is one
    is known (`last`). Never draws more than `most`, as what is drawn and not used would be drawn again."""

    def __init__(self, drawn: Iterator[Drawn], carrier: Carrier, most: int | None) -> None:
        self._drawn, self._carrier, self._left = drawn, carrier, most
        self._next: Drawn | None = None
        self._begun = False

    @property
    def last(self) -> bool:
        """Was the batch given last the last one?"""
        return self._next is None

    def __iter__(self) -> Iterator[Drawn]:
        return self

    def __next__(self) -> Drawn:
        current = self._next if self._begun else self._draw()
        self._begun = True
        if current is None:
            raise StopIteration
        self._next = None  # should drawing fail, nothing is dealt twice
        self._next = self._draw()
        return current._replace(batch=self._carrier.arrived(current.batch))

    def _draw(self) -> Drawn | None:
        if self._left is not None:
            if self._left <= 0:
                return None
            self._left -= 1
        drawn = next(self._drawn, None)
        return None if drawn is None else drawn._replace(batch=self._carrier.send(drawn.batch))


def make_carrier(device: torch.device, *, channels_last: bool) -> Carrier:
    kind = CudaCarrier if device.type == "cuda" else Carrier
    return kind(device, channels_last=channels_last)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy from pageable memory would wait for the device."""
    return tensor if tensor.device.type != "cpu" or tensor.is_pinned() else tensor.pin_memory()


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    images = tensor.dim() == 4 and tensor.is_floating_point()
    return tensor.contiguous(memory_format=torch.channels_last) if images else tensor


def _each_tensor(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The batch with its tensors changed, in plain containers at any depth; anything else stays as it is."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if type(batch) is dict:
        return {key: _each_tensor(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_each_tensor(value, change) for value in batch))
    if type(batch) in (tuple, list):
        return type(batch)(_each_tensor(value, change) for value in batch)
    return batch
