"""Number formats: what wraps the forward pass, the backward pass and the step. The only place that knows them."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import torch

from raysgd.errors import ConfigError

__all__ = ["Bf16", "Fp16", "Fp32", "Precision", "make_precision"]


NOTHING = contextlib.nullcontext()


class Precision:
    """Full precision, and the shape of the others. One object per operator; owns scalers and nothing else."""

    key = ""

    def prepare(self, models: list[Any], optimizers: list[Any], args: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        """At registration, before any wrapping; may exchange models and optimizers."""
        return models, optimizers

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return NOTHING

    def backward(self, loss: torch.Tensor, optimizer: Any = None, *, loss_id: int = 0) -> None:
        loss.backward()

    def unscale(self, optimizer: Any) -> None:
        """Before gradients are looked at (clipping)."""

    def step(self, optimizer: Any) -> None:
        optimizer.step()

    def parameters(self, optimizer: Any) -> list[torch.Tensor]:
        """What the optimizer's step changes, and whose gradients clipping looks at."""
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def batch_done(self) -> None:
        """After a batch, however many optimizers stepped in it."""

    def skipped(self) -> int:
        """How many steps were left out in this call, because gradients were not finite."""
        return 0

    def forget_skipped(self) -> None:
        """A call begins."""

    def abandon(self) -> None:
        """A batch was cut short: what it had begun is void."""

    def state(self) -> dict[str, Any] | None:
        return None

    def load(self, state: dict[str, Any]) -> None:
        """Takes back what `state` gave."""


class Fp32(Precision):
    """Nothing to do."""


class Bf16(Precision):
    """bfloat16 where it is safe; its range needs no scaling."""

    def __init__(self, device: torch.device) -> None:
        self._type = device.type

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self._type, dtype=torch.bfloat16)


class Fp16(Precision):
    """float16 with a scaled loss. The scale changes between batches only, so several optimizers share it safely."""

    key = "amp_native"

    def __init__(self, device: torch.device) -> None:
        self._type = device.type
        self.scaler = torch.amp.GradScaler(device.type)
        self._stepped: set[int] = set()
        self._unscaled: set[int] = set()
        self._one = torch.ones((), device=device)
        self._skipped = torch.zeros((), device=device)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(self._type, dtype=torch.float16)

    def backward(self, loss: torch.Tensor, optimizer: Any = None, *, loss_id: int = 0) -> None:
        self.scaler.scale(loss).backward()

    def unscale(self, optimizer: Any) -> None:
        if id(optimizer) not in self._unscaled:
            self._unscaled.add(id(optimizer))
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Any) -> None:
        if id(optimizer) in self._stepped:
            self.batch_done()
        self._stepped.add(id(optimizer))
        self.scaler.step(optimizer)

    def batch_done(self) -> None:
        if self._stepped:
            before = self.scaler.scale(self._one)
            self.scaler.update()
            # The scale falls exactly when a step was skipped. Counted where it lies: nobody waits for the device.
            self._skipped = self._skipped + (self.scaler.scale(self._one) < before)
        self._stepped.clear()
        self._unscaled.clear()

    def skipped(self) -> int:
        return int(self._skipped.item())

    def forget_skipped(self) -> None:
        self._skipped = torch.zeros_like(self._skipped)

    def abandon(self) -> None:
        kept = self.scaler.state_dict()
        self.scaler = torch.amp.GradScaler(self._type)
        self.scaler.load_state_dict(kept)
        self._stepped.clear()
        self._unscaled.clear()

    def state(self) -> dict[str, Any] | None:
        return dict(self.scaler.state_dict())

    def load(self, state: dict[str, Any]) -> None:
        self.scaler.load_state_dict(state)


class Apex(Precision):
    """NVIDIA Apex's amp, where a version that has it is installed."""

    key = "amp_apex"

    def __init__(self) -> None:
        self.amp = find_apex()
        self._optimizers: list[Any] = []

    def prepare(self, models: list[Any], optimizers: list[Any], args: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        models, optimizers = self.amp.initialize(models, optimizers, **args)
        self._optimizers = list(optimizers)
        return list(models), list(optimizers)

    def parameters(self, optimizer: Any) -> list[torch.Tensor]:
        return list(self.amp.master_params(optimizer))

    def backward(self, loss: torch.Tensor, optimizer: Any = None, *, loss_id: int = 0) -> None:
        of = self._optimizers if optimizer is None else optimizer
        with self.amp.scale_loss(loss, of, loss_id=loss_id) as scaled:
            scaled.backward()

    def state(self) -> dict[str, Any] | None:
        return dict(self.amp.state_dict())

    def load(self, state: dict[str, Any]) -> None:
        self.amp.load_state_dict(state)


def find_apex() -> Any:
    """Apex's amp module; an ImportError that says what was found instead."""
    try:
        apex = importlib.import_module("apex")
    except ImportError as error:
        found = "nothing called apex is installed"
        if error.name != "apex":  # PyPI's apex, which is for another purpose, or one that was built for another torch
            found = f"the apex that is installed cannot be imported ({error}): it is another package, or was built for another torch"
        raise ImportError(
            f"precision 'apex' needs NVIDIA Apex, and {found}. It is not on PyPI: build a "
            "release that still has apex.amp (25.02 or before) from NVIDIA's sources, or use 'fp16', which needs "
            "nothing but torch"
        ) from error
    try:
        return importlib.import_module("apex.amp")
    except ImportError as error:
        kind = "an Apex without amp (it was removed in 2025)" if hasattr(apex, "optimizers") else "another package"
        raise ImportError(
            f"precision 'apex' needs apex.amp, but the apex found at {getattr(apex, '__file__', '?')} is {kind}. "
            "Install NVIDIA Apex 25.02 or before from its sources, or use 'fp16', which needs nothing but torch"
        ) from error


def make_precision(name: str, device: torch.device) -> Precision:
    if name == "fp32":
        return Fp32()
    if name == "bf16":
        return Bf16(device)
    if name == "fp16":
        return Fp16(device) if _is_native() else Apex()
    if name == "apex":
        return Apex()
    raise ConfigError(f"precision must be 'fp32', 'fp16', 'bf16' or 'apex', got {name!r}")


def _is_native() -> bool:
    """Has torch mixed precision of its own? A build without it takes Apex, as RaySGD v1 did."""
    return hasattr(torch, "autocast") and hasattr(getattr(torch, "amp", None), "GradScaler")
