"""Send a copy of models: what they are as a pickle, and their weights as bytes. Both."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from raysgd.core.channel.blobs import Blobs
from raysgd.torch.state import packing


def packed_models(models: Sequence[nn.Module], dumps: Callable[[Any], bytes]) -> Blobs:
    """The models, on the CPU and in eval mode, and the memory of their weights, which several may
    share. `dumps` pickles their classes, too, which can be the script's own."""
    apart = list({id(each): each for each in _apart(models)}.values())  # some are in two places
    empty = [_empty(each) for each in apart]
    memo: dict[int, Any] = {id(each): place for each, place in zip(apart, empty, strict=True)}
    copied = [copy.deepcopy(model, memo).cpu().eval() for model in models]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in apart}
    numbers = {pointer: number for number, pointer in enumerate(storages)}
    views = [
        (numbers[each.untyped_storage().data_ptr()], each.storage_offset(), each.shape, each.stride()) for each in apart
    ]
    return Blobs([dumps((copied, empty, views)), *map(_memory, storages.values())])


def _memory(storage: torch.UntypedStorage) -> memoryview:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage.cpu()).numpy().data


def unpacked_models(blobs: Blobs) -> list[nn.Module]:
    """The models, whose weights have the memory of the data."""
    content, *memory = blobs.data
    models, empty, views = pickle.loads(content)
    storages = [torch.frombuffer(each, dtype=torch.uint8).untyped_storage() for each in memory]
    for place, (number, *view) in zip(empty, views, strict=True):
        place.data = torch.empty(0, dtype=place.dtype, device="cpu").set_(storages[number], *view)
    return list(models)


def _apart(models: Sequence[nn.Module]) -> Iterator[torch.Tensor]:
    """The weights and buffers that need not be pickled: of modules that are copied in the usual
    way."""
    for model in models:
        if any(hasattr(module, "__deepcopy__") for module in model.modules()):
            continue
        for each in (*model.parameters(), *model.buffers()):
            usual = type(each) is nn.Parameter or (type(each) is torch.Tensor and packing.is_ordinary(each))
            if usual and packing.has_bytes(each) and each.numel():
                yield each


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
