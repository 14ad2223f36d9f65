"""Automatic mixed precision for training functions."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

__all__ = ["Amp", "ScaledOptimizer", "with_autocast"]


class Amp:
    """What `accelerate` decided for this run of the function. `scaler` is there on a GPU only: bfloat16 needs none."""

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self.enabled = enabled
        self.dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
        self.scaler = torch.amp.GradScaler("cuda") if enabled and device.type == "cuda" else None


def with_autocast(model: nn.Module, amp: Amp, device: torch.device) -> None:
    """The model's own forward, in mixed precision; its parameters, its name and its state stay what they are."""
    forward = model.forward

    def in_autocast(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, dtype=amp.dtype):
            return to_float32(forward(*args, **kwargs))

    model.forward = types.MethodType(in_autocast, model)


def to_float32(value: Any) -> Any:
    """Losses are computed in full precision."""
    if isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16):
        return value.float()
    if isinstance(value, dict):
        return {key: to_float32(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(to_float32(each) for each in value)
    return value


class ScaledOptimizer(Optimizer):
    """Stands in front of the user's optimizer: the same parameters and state, but `step` goes through the scaler."""

    def __init__(self, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
        # Not Optimizer.__init__: everything that it would make is the wrapped one's, and shared with it.
        self.optimizer, self.scaler = optimizer, scaler

    def __getattr__(self, name: str) -> Any:
        if name in ("optimizer", "scaler"):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Any = None) -> Any:
        """One step, unless the gradients overflowed; then the scale is lowered."""
        result = self.scaler.step(self.optimizer) if closure is None else self.scaler.step(self.optimizer, closure)
        self.scaler.update()
        return result

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)
