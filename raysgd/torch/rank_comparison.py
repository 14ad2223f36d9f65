"""Summarize an operator's weights and settings, for the comparison of ranks. Worker."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from raysgd.core.rank_comparison import Summary
from raysgd.training.rank_comparison import BLOCK, Products, direction, numbers, share_of, window

MOST_ENTRIES = 64  # of the operator's lists and dictionaries in which modules are looked for
# Parameters up to the first size are sent to the CPU as they are; up to the second one they are read in shorter blocks, because the
# square of one product says little about a parameter's norm.
TINY, SMALL, SHORT = 1024, 16 * BLOCK, 64
CONVERTED = 256 * BLOCK  # how many elements of another type than float32 and float64 are converted at once


def summary_of(operator: Any, turn: int) -> Summary:
    """Return what this rank reports: the parameters of the registered models; those of the
    criterion and of other modules among the operator's attributes, if they train; and the settings
    of all optimizers, registered or not."""
    parts, named = operator._parts, dict(_attributes(operator))
    names = {id(each): name for name, each in reversed(named.items())}
    registered: dict[str, torch.Tensor] = {}
    for number, (bare, wrapped) in enumerate(zip(parts.models, parts.wrapped, strict=True)):
        label = names.get(id(wrapped)) or names.get(id(bare)) or f"models[{number}]"
        registered |= {f"{name} of {label}": each for name, each in bare.named_parameters()}
    known = {id(each) for each in registered.values()}
    alone: dict[str, torch.Tensor] = {}
    for label, module in {**named, "criterion": parts.criterion}.items():
        for name, each in module.named_parameters() if isinstance(module, nn.Module) else ():
            if each.requires_grad and id(each) not in known:
                known.add(id(each))
                alone[f"{name} of {label}"] = each
    settings: dict[str, Any] = {}
    for number, optimizer in enumerate(parts.optimizers):
        label = names.get(id(optimizer), f"optimizers[{number}]")
        settings |= _settings(f"{label} ({type(optimizer).__name__})", optimizer)
    stepped = {id(each) for each in parts.optimizers}
    for label, each in named.items():
        if isinstance(each, Optimizer) and id(each) not in stepped:
            settings |= _settings(f"{label} ({type(each).__name__}, which is not registered)", each)
    read = _read({**registered, **alone}, turn)
    weights = numbers({name: each for name, each in read.items() if name not in alone})
    return Summary(weights, numbers({name: each for name, each in read.items() if name in alone}), settings)


def _attributes(operator: Any) -> Iterator[tuple[str, Any]]:
    """Yield what the operator holds, also in lists and dictionaries, and how users refer to it."""
    for name, value in vars(operator).items():
        yield f"self.{name}", value
        if isinstance(value, (list, tuple, dict)) and len(value) <= MOST_ENTRIES:
            members: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else enumerate(value)
            for key, each in members:
                yield f"self.{name}[{key!r}]", each


def _settings(label: str, optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's comparable settings: numbers, strings, and lists of them."""
    found: dict[str, Any] = {}
    for number, group in enumerate(optimizer.param_groups):
        of = label if len(optimizer.param_groups) == 1 else f"parameter group {number} of {label}"
        options = {key: _plain(each) for key, each in group.items() if key != "params"}
        found |= {f"{key} of {of}": value for key, value in options.items() if value is not None}
    return found


def _plain(value: Any) -> Any:
    """Return a setting as JSON can; None for objects, whose text differs between processes."""
    if isinstance(value, torch.Tensor):
        return value.tolist() if value.numel() == 1 else None
    if value is None or isinstance(value, (bool, str)):
        return "None" if value is None else value
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, (list, tuple)):
        every = [_plain(each) for each in value]
        return None if None in every or len(every) > MOST_ENTRIES else every
    return None


def _read(parameters: Mapping[str, Any], turn: int) -> dict[str, Products]:
    """Read the parameters, or a part of them. The results are sent to the CPU together, because
    each transfer waits for the device."""
    flat = {_place(name, each): elements_of(each.detach()) for name, each in parameters.items() if not is_lazy(each)}
    share = share_of(sum(each.numel() * each.element_size() for each in flat.values()))
    found: dict[torch.device, list[torch.Tensor]] = {}
    counts: dict[str, int] = {}
    for name, each in flat.items():
        start, stop = window(each.numel(), share, turn) if each.numel() > SMALL else (0, each.numel())
        products = _products(each[start:stop])
        counts[name] = sum(map(len, products))
        found.setdefault(each.device, []).extend(products)
        flat[name] = each[start:stop]
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
    """Return a name that only ranks with the same part of this parameter use."""
    if not hasattr(parameter, "to_local"):
        return name
    place = zip(parameter.device_mesh.get_coordinate(), parameter.placements, strict=True)
    return f"{name}, shard {', '.join(str(number) for number, placement in place if placement.is_shard())}"


def elements_of(tensor: Any) -> torch.Tensor:
    """Return the elements of this rank in memory order. Dense tensors are not copied."""
    real: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    real = torch.view_as_real(real) if real.is_complex() else real
    if real.is_contiguous():
        return real.view(-1)
    strides = real.stride()
    return real.permute(sorted(range(real.dim()), key=lambda each: -strides[each])).reshape(-1)


def _products(flat: torch.Tensor) -> list[torch.Tensor]:
    """Return the products of a parameter's blocks, and the rest; a few elements as they are."""
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
