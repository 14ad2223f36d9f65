"""Sum an operator's weights, for the comparison of ranks. Worker."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

# How far apart two ranks may be, as a fraction of a parameter's norm (or of the model's mean square, if that is larger, because a bias
# can be near zero). All ranks apply the same averaged gradients, so nothing amplifies a difference between them. What differs on
# processors of two types is the rounding of single operations, by one unit in the last place: 6e-8 in float32, and after n steps at
# most about sqrt(n) as much. 1e-4 is reached after 2.8 million steps in which every element was rounded differently. Ranks that train
# on gradients of their own are further apart after one step, unless its rate is below that.
TOLERANCE = 1e-4
# Two units in the last place of types that have fewer digits, of which few elements are rounded differently in a step.
ROUGH = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
ALONE = ", which belongs to no registered model and is therefore not averaged,"


def sums_of(operator: Any, registered: Any) -> str:
    """What this rank reports, as JSON: of each parameter its sum, its norm, and how far they may be
    apart from those of another rank. These are the parameters of the registered models, and those
    of other modules that the operator holds, if they train."""
    named = {f"self.{name}": value for name, value in vars(operator).items()}
    names = {id(each): name for name, each in named.items()}
    tensors: dict[str, torch.Tensor] = {}
    for number, (bare, wrapped) in enumerate(zip(registered.models, registered.wrapped, strict=True)):
        label = names.get(id(wrapped)) or names.get(id(bare)) or f"models[{number}]"
        tensors |= {f"{name} of {label}": each for name, each in bare.named_parameters()}
    known = {id(each) for each in tensors.values()}
    for label, module in {"criterion": registered.criterion, **named}.items():
        for name, each in module.named_parameters() if isinstance(module, nn.Module) else ():
            if each.requires_grad and id(each) not in known:
                tensors[f"{name} of {label}{ALONE}"] = each
    tensors = {name: elements_of(each.detach()) for name, each in tensors.items() if not is_lazy(each)}
    tensors = {name: each for name, each in tensors.items() if each.numel()}
    sums = _sums(list(tensors.values()))
    finite = [(norm, each.numel()) for (_, norm), each in zip(sums, tensors.values(), strict=True) if norm < math.inf]
    mean = sum(norm**2 for norm, _ in finite) / max(sum(count for _, count in finite), 1)
    rows = zip(tensors.items(), sums, strict=True)
    return json.dumps({name: [*each, _allowed(tensor, each[1], mean)] for (name, tensor), each in rows})


def _sums(tensors: Sequence[torch.Tensor]) -> list[list[float]]:
    """Each tensor's sum and norm, of elements or of products of its rows with a vector, which are
    about as large, in a sixth of the time. They are sent to the CPU together, because each transfer
    waits for the device."""
    pairs = []
    for each in tensors:
        exact = each.dtype in (torch.float32, torch.float64)
        real = each if exact else each.float()
        values = (real @ _direction(real.shape[-1], real.device, real.dtype) if real.dim() > 1 else real).double()
        pairs.append(torch.stack([values.sum(), torch.linalg.vector_norm(values)]))
    devices = dict.fromkeys(each.device for each in pairs)
    sums = {on: iter(torch.stack([each for each in pairs if each.device == on]).tolist()) for on in devices}
    return [next(sums[each.device]) for each in pairs]


@functools.cache
def _direction(size: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """The vector for rows of this length, the same on every machine, of variance 1."""
    drawn = torch.rand(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return ((drawn * 2 - 1) * 3**0.5).to(device, dtype)


def _allowed(tensor: torch.Tensor, norm: float, mean: float) -> float:
    return ROUGH.get(tensor.dtype, TOLERANCE) * max(norm, math.sqrt(mean * tensor.numel()))


def elements_of(tensor: Any) -> torch.Tensor:
    """The elements that are on this rank, as real numbers. They are not copied."""
    real: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return torch.view_as_real(real) if real.is_complex() else real
