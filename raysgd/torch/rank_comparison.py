"""Summarize an operator's weights and settings, for the comparison of ranks. Worker."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from raysgd.core.rank_comparison import Summary
from raysgd.training.rank_comparison import BLOCK, Products, direction, numbers

MOST_ENTRIES = 64  # of a setting that is a list
# Parameters up to the first size are sent to the CPU as they are; up to the second one they are read in shorter blocks, because the
# square of one product says little about a parameter's norm.
TINY, SMALL, SHORT = 1024, 16 * BLOCK, 64
CONVERTED = 256 * BLOCK  # how many elements of another type than float32 and float64 are converted at once


def summary_of(operator: Any, parts: Any) -> Summary:
    """Collect what this rank reports: the parameters of the registered models; those of other
    modules that the operator holds, if they train; and the settings of the optimizers."""
    named = {f"self.{name}": value for name, value in vars(operator).items()}
    names = {id(each): name for name, each in named.items()}
    registered: dict[str, torch.Tensor] = {}
    for number, (bare, wrapped) in enumerate(zip(parts.models, parts.wrapped, strict=True)):
        label = names.get(id(wrapped)) or names.get(id(bare)) or f"models[{number}]"
        registered |= {f"{name} of {label}": each for name, each in bare.named_parameters()}
    known = {id(each) for each in registered.values()}
    alone = {
        f"{name} of {label}": each
        for label, module in {"criterion": parts.criterion, **named}.items()
        for name, each in (module.named_parameters() if isinstance(module, nn.Module) else ())
        if each.requires_grad and id(each) not in known
    }
    settings: dict[str, Any] = {}
    for number, optimizer in enumerate(parts.optimizers):
        label = names.get(id(optimizer), f"optimizers[{number}]")
        settings |= _settings(f"{label} ({type(optimizer).__name__})", optimizer)
    read = _read({**registered, **alone})
    weights = numbers({name: each for name, each in read.items() if name not in alone})
    return Summary(weights, numbers({name: each for name, each in read.items() if name in alone}), settings)


def _settings(label: str, optimizer: Any) -> dict[str, Any]:
    """Collect an optimizer's comparable settings: numbers, strings, and lists of them."""
    found: dict[str, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        of = label if len(optimizer.param_groups) == 1 else f"parameter group {number} of {label}"
        options = {key: plain(each) for key, each in group.items() if key != "params"}
        found |= {f"{key} of {of}": value for key, value in options.items() if value is not None}
    return found


def plain(value: Any) -> Any:
    """A setting as JSON has it; None for objects, whose text differs between processes."""
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.numel() == 1 else None
    if value is None or isinstance(value, (bool, str)):
        return "None" if value is None else value
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, (list, tuple)):
        every = [plain(each) for each in value]
        return None if None in every or len(every) > MOST_ENTRIES else every
    return None


def _read(parameters: Mapping[str, Any]) -> dict[str, Products]:
    """Read the parameters. The results are sent to the CPU together, because each transfer waits
    for the device."""
    flat = {_place(name, each): elements_of(each.detach()) for name, each in parameters.items() if not is_lazy(each)}
    found: dict[torch.device, list[torch.Tensor]] = {}
    counts: dict[str, int] = {}
    for name, each in flat.items():
        products = _products(each)
        counts[name] = sum(map(len, products))
        found.setdefault(each.device, []).extend(products)
    results = {device: torch.cat(every).cpu().double().numpy() for device, every in found.items()}
    places = dict.fromkeys(found, 0)
    read = {}
    for name, each in flat.items():
        place = places[each.device]
        places[each.device] += counts[name]
        mine = results[each.device][place : place + counts[name]]
        read[name] = Products(mine, each.numel(), str(each.dtype).removeprefix("torch."))
    return {name: each for name, each in read.items() if each.elements}


def _place(name: str, parameter: Any) -> str:
    """A name that only ranks with the same part of this parameter use."""
    if not hasattr(parameter, "to_local"):
        return name
    place = zip(parameter.device_mesh.get_coordinate(), parameter.placements, strict=True)
    return f"{name}, shard {', '.join(str(number) for number, placement in place if placement.is_shard())}"


def elements_of(tensor: Any) -> torch.Tensor:
    """The elements of this rank in memory order. Dense tensors are not copied."""
    real: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    real = torch.view_as_real(real) if real.is_complex() else real
    if real.is_contiguous():
        return real.view(-1)
    strides = real.stride()
    return real.permute(sorted(range(real.dim()), key=lambda each: -strides[each])).reshape(-1)


def _products(flat: torch.Tensor) -> list[torch.Tensor]:
    """Compute the products of a parameter's blocks, and the rest; a few elements as they are."""
    size = flat.numel()
    if size <= TINY:
        return [flat]
    block = SHORT if size <= SMALL else BLOCK
    whole = size - size % block
    exact = flat.dtype in (torch.float32, torch.float64)
    vector = _direction(flat.device, flat.dtype if exact else torch.float32)[:block]
    pieces = [flat[:whole]] if exact else [piece.float() for piece in flat[:whole].split(CONVERTED)]
    products = [torch.mv(piece.view(-1, block), vector) for piece in pieces]
    return products if whole == size else [*products, *_products(flat[whole:])]


@functools.cache
def _direction(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(direction()).to(device, dtype)
