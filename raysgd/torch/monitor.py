"""What a worker measures for callbacks in each optimizer step: learning rates and gradient norms.
Worker."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from raysgd.core.metrics import SECONDS
from raysgd.errors import ConfigError
from raysgd.torch.foreign import exposed_communication_s, measure_communication, was_skipped
from raysgd.torch.meters import DeviceMeters
from raysgd.torch.parts import Parts
from raysgd.training.step import Step
from raysgd.training.step_policy import Policy


class Monitor:
    """Owns the measurements of one part of a call of `train`. `measures` are those that callbacks
    want (`Measure`)."""

    def __init__(self, measures: frozenset[str], parts: Parts) -> None:
        self._measures, self._parts = measures, parts
        self._rates: dict[str, Any] = {}
        self.begin()

    def begin(self) -> None:
        """Forget what was measured, because a part of a call begins. Let DDP measure."""
        self._meter = DeviceMeters()
        self._communication: float | None = None
        for each in self._measured_wrappers():
            measure_communication(each)

    def watch(self, *, clips_itself: bool) -> None:
        """Measure the steps of the optimizers. `clips_itself` is whether the operator clips the
        gradients itself."""
        if clips_itself and "grad_norm" in self._measures:
            raise ConfigError(
                "GradientNormMonitor cannot see the gradients of a LightningModule before they are clipped: log "
                "lightning.pytorch.utilities.grad_norm(self, 2) in its on_before_optimizer_step"
            )
        for optimizer in self._parts.optimizers:
            if hasattr(optimizer, "register_step_post_hook"):
                if "lr" in self._measures:
                    optimizer.register_step_pre_hook(self._steps)
                    optimizer.register_step_post_hook(self._stepped)
            elif self._measures - {"seconds"}:
                raise ConfigError(
                    f"LearningRateMonitor and GradientNormMonitor follow the steps of torch optimizers, got a "
                    f"{type(optimizer).__name__}, which has no register_step_post_hook: leave them out"
                )

    def see_gradients(self, optimizer: Any) -> None:
        """Measure the norm of the gradients, as they are before they are clipped."""
        parts = self._parts
        found = [each.grad for each in parts.stepped_by(optimizer) if each.grad is not None]
        norm: Any = torch.nn.utils.get_total_norm(found)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if parts.precision.key == "amp_native" and not torch.isfinite(norm):  # its scaler will skip the step
            return
        number = f"_{parts.optimizers.index(optimizer)}" if len(parts.optimizers) > 1 else ""
        self._meter.update({f"grad_norm{number}": norm})

    def _steps(self, optimizer: Any, *_: Any) -> None:
        """Note the rates of a step before it: a user's hook may change them when the step has
        ended."""
        groups = [group for each in self._parts.optimizers for group in each.param_groups]
        self._rates = {
            f"lr_{number}" if len(groups) > 1 else "lr": group["lr"]
            for number, group in enumerate(groups)
            if any(group is own for own in optimizer.param_groups)
        }

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        if not was_skipped(optimizer):
            self._meter.update(self._rates)

    def see_communication(self) -> None:
        """Add the time that DDP measured in its newest step."""
        for each in self._measured_wrappers():
            self._communication = (self._communication or 0.0) + exposed_communication_s(each)

    def _measured_wrappers(self) -> list[DistributedDataParallel]:
        wrapped = self._parts.wrapped if "seconds" in self._measures else []
        return [each for each in wrapped if isinstance(each, DistributedDataParallel)]

    def measured(self) -> dict[str, Any]:
        """The metrics of this part of the call, and the seconds of communication if they are
        known."""
        found = self._meter.summary()
        values = {
            name: value for name, value in found.items() if name.removeprefix("last_").startswith(("lr", "grad_norm"))
        }
        return values | ({} if self._communication is None else {SECONDS["communication"]: self._communication})


class GradientNorm(Policy):
    """Lets the monitor see the gradients of each step, as they are before they are clipped."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def gradients(self, step: Step, optimizer: Any) -> bool:
        self._monitor.see_gradients(optimizer)
        return True

    def direct(self, step: Step, optimizer: Any) -> None:
        if getattr(optimizer, "grad_scale", None) is not None:
            raise ConfigError(
                "GradientNormMonitor was passed, but a fused optimizer unscales the gradients of precision='fp16' only inside its "
                "step: call self.step(optimizer), which unscales them before, instead of the scaler's step"
            )
        self.gradients(step, optimizer)


class Communication(Policy):
    """Lets the monitor see how long each committed step has waited for the other ranks'
    gradients."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def on_step(self, step: Step) -> None:
        if step.committed:
            self._monitor.see_communication()
