"""What happens between the backward pass and the step: accumulation windows, and gradient clipping. Worker.

An accumulation window is `accumulate` batches that share one optimizer step, or fewer at the end of an epoch or call.
Its gradients are the mean over all its samples: the same as of one batch that holds them all, for a loss that is a mean
over samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from raysgd.errors import ConfigError
from raysgd.torch.foreign import multiply_all
from raysgd.torch.monitor import Monitor
from raysgd.torch.options import TrainingOptions
from raysgd.torch.parts import Parts
from raysgd.torch.precision import Precision

__all__ = ["Gradients", "samples_in"]


class Gradients:
    """Owns the open window. The feed calls `begin` before each batch; the operator's helpers call the rest.

    Without a feed, as in a validation or in a user's function, every batch is a window of its own.
    """

    def __init__(self, options: TrainingOptions, precision: Precision, parts: Parts, monitor: Monitor) -> None:
        self._options, self._precision, self._parts, self._monitor = options, precision, parts, monitor
        self._accumulates = options.accumulate > 1
        clips = options.clip_norm is not None or options.clip_value is not None
        self._reads_gradients = clips or monitor.needs_gradients
        self._stepping = False
        self.abandon()

    def abandon(self) -> None:
        """Forget the open window, because its batches will be drawn again."""
        self._position, self._closing = 0, True
        self._samples, self._total, self._usual = 1.0, 0.0, 1.0
        self._witness: torch.Tensor | None = None
        if self._accumulates:
            self._exchange_gradients(True)

    def begin(self, batch: Any, position: int, closing: bool) -> None:
        """Prepare for a batch, which is at this position of its window; `closing` is whether it is the last one."""
        if not self._accumulates:
            return
        self._position, self._closing = position, closing
        self._samples = float(samples_in(batch))
        if position == 0:
            self._total, self._usual, self._witness = 0.0, self._samples * self._options.accumulate, None
        self._total += self._samples
        if closing and self._total != self._usual:
            self._shorten(position > 0)
        self._exchange_gradients(closing)

    def _shorten(self, begun: bool) -> None:
        """Give the gradients so far more weight, because this window has fewer samples than usual. This must happen
        before the ranks exchange gradients, since another rank's window can have another number of samples."""
        if begun:
            factor, shards = self._usual / self._total, self._parts.shards
            for optimizer in self._parts.optimizers:
                _scale([each.grad for each in self._precision.parameters(optimizer)], factor)
            _scale(shards.unexchanged_gradients() if shards else [], factor)
        self._usual = self._total

    def zero_grad(self, optimizers: Sequence[Any]) -> None:
        if self._position == 0:
            for optimizer in optimizers:
                self._parts.exchange.finish(optimizer)  # of a batch whose step was left out
                optimizer.zero_grad()

    def backward(self, loss: torch.Tensor, optimizer: Any, loss_id: int = 0) -> None:
        if self._accumulates:
            self._check_witness()
            loss = loss * (self._samples / self._usual)
        self._precision.backward(loss, optimizer, loss_id=loss_id)

    def step(self, optimizer: Any) -> None:
        """Clip the gradients and apply the step, if the window ends with this batch."""
        if not self._closing:
            self._choose_witness(optimizer)
            return
        self._parts.exchange.finish(optimizer)
        self._precision.check_step(optimizer, direct=False)
        if self._reads_gradients:
            self._precision.unscale(optimizer)
            self._clip(optimizer)
        self._stepping = True
        try:
            self._precision.step(optimizer)
        finally:
            self._stepping = False

    def watch(self, optimizers: Sequence[Any]) -> None:
        """Let the options also hold for steps that user code makes with `optimizer.step()`: clip before them, and raise an
        error if the precision is not used."""
        for optimizer in optimizers:
            if hasattr(optimizer, "register_step_pre_hook"):
                optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._stepping:
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0] is the optimizer
        if callable(closure):  # it computes the gradients during the step, and may be called several times

            def clipping() -> Any:
                loss = closure()
                self._prepare_direct_step(optimizer)
                return loss

            return args[:1], {**kwargs, "closure": clipping}
        self._prepare_direct_step(optimizer)
        return None

    def _prepare_direct_step(self, optimizer: Any) -> None:
        self._precision.check_step(optimizer, direct=True)
        if not self._reads_gradients:
            return
        if getattr(optimizer, "grad_scale", None) is not None:
            raise ConfigError(
                "clipping or GradientNormMonitor was passed, but a fused optimizer unscales the gradients of precision='fp16' only "
                "inside its step: call self.step(optimizer), which unscales them before, instead of the scaler's step"
            )
        self._clip(optimizer)

    def _clip(self, optimizer: Any) -> None:
        """Measure the gradients if a callback wants that, and clip them."""
        parameters = self._precision.parameters(optimizer)
        if self._monitor.needs_gradients:
            self._monitor.see_gradients(optimizer, parameters, skips=self._precision.key == "amp_native")
        if self._options.clip_value is not None:
            nn.utils.clip_grad_value_(parameters, self._options.clip_value)
        if self._options.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, self._options.clip_norm)

    def stepped(self) -> None:
        """Raise an error if an optimizer has stepped before the end of the window."""
        if not self._closing:
            raise ConfigError(
                f"accumulate={self._options.accumulate} was passed, but this operator steps its optimizer itself after "
                "every batch: use self.zero_grad(), self.backward(loss) and self.step(optimizer), which take the "
                "accumulation into account, or leave accumulate out"
            )

    def _exchange_gradients(self, on: bool) -> None:
        """Let the next backward pass average the gradients over the ranks, or not. It does so once for each window."""
        self._parts.exchange.hold(not on)
        for model in self._parts.wrapped:
            if hasattr(model, "require_backward_grad_sync"):
                model.require_backward_grad_sync = on  # type: ignore[assignment]
            elif hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(on)  # type: ignore[operator]

    def _choose_witness(self, optimizer: Any) -> None:
        """Remember a parameter that has a gradient, to notice if user code clears it before the window ends."""
        parameters = self._precision.parameters(optimizer)
        self._witness = next((each for each in parameters if each.grad is not None), None)

    def _check_witness(self) -> None:
        if self._position and self._witness is not None and self._witness.grad is None:
            raise ConfigError(
                f"gradients were cleared in the middle of {self._options.accumulate} batches that share one step: call "
                "self.zero_grad() instead of optimizer.zero_grad(); it clears them only where a window begins"
            )


def _scale(gradients: Sequence[torch.Tensor | None], factor: float) -> None:
    multiply_all([each for each in gradients if each is not None], factor)


def samples_in(batch: Any) -> int:
    """Return how many samples a batch has: the length of the first tensor in it, or 1 if there is none."""
    return _length(batch) or 1


def _length(part: Any) -> int | None:
    if isinstance(part, torch.Tensor):
        return part.shape[0] if part.dim() else None
    if isinstance(part, Mapping):
        part = list(part.values())
    if isinstance(part, (list, tuple)):
        return next((length for each in part if (length := _length(each)) is not None), None)
    return None
