"""What happens between backward and step: windows of batches that share one step, and clipping.

A window is `accumulate` batches, or what is left of them at the end of an epoch or call. Its gradients are the mean
over all its samples: the same as of one batch that holds them all (for a loss that is a mean over samples).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from raysgd.errors import ConfigError
from raysgd.torch.foreign import multiply_all
from raysgd.torch.options import TrainingOptions
from raysgd.torch.parts import Parts
from raysgd.torch.precision import Precision

__all__ = ["Gradients", "samples_in"]


class Gradients:
    """Owns the open window. Told by the feed where each batch stands; asked by the operator's helpers.

    Without a feed (a function of the user's, a validation) every batch is a window of its own.
    """

    def __init__(self, options: TrainingOptions, precision: Precision, parts: Parts) -> None:
        self._options, self._precision, self._parts = options, precision, parts
        self._waits = options.accumulate > 1
        self.abandon()

    def abandon(self) -> None:
        """The window is void: its batches will be dealt again."""
        self._position, self._closing = 0, True
        self._samples, self._total, self._usual = 1.0, 0.0, 1.0
        self._witness: torch.Tensor | None = None
        if self._waits:
            self._sync(True)

    def begin(self, batch: Any, position: int, closing: bool) -> None:
        """A batch is about to be worked on; `closing`: its window ends with it."""
        if not self._waits:
            return
        self._position, self._closing = position, closing
        self._samples = float(samples_in(batch))
        if position == 0:
            self._total, self._usual, self._witness = 0.0, self._samples * self._options.accumulate, None
        self._total += self._samples
        if closing and self._total != self._usual:
            self._shorten(position > 0)
        self._sync(closing)

    def _shorten(self, begun: bool) -> None:
        """This window ends with less than usual: what it has so far weighs more. Before ranks exchange their sums, since
        another rank's window can hold another number of samples."""
        if begun:
            factor, shards = self._usual / self._total, self._parts.shards
            for optimizer in self._parts.optimizers:
                _scale([each.grad for each in self._precision.parameters(optimizer)], factor)
            _scale(shards.held_back() if shards else [], factor)
        self._usual = self._total

    def zero_grad(self, optimizers: Sequence[Any]) -> None:
        if self._position == 0:
            for optimizer in optimizers:
                self._parts.exchange.finish(optimizer)  # of a batch whose step was left out
                optimizer.zero_grad()

    def backward(self, loss: torch.Tensor, optimizer: Any, loss_id: int = 0) -> None:
        if self._waits:
            self._look_for_witness()
            loss = loss * (self._samples / self._usual)
        self._precision.backward(loss, optimizer, loss_id=loss_id)

    def step(self, optimizer: Any) -> None:
        """The step, where the window ends; nothing before that."""
        if not self._closing:
            self._remember_witness(optimizer)
            return
        self._parts.exchange.finish(optimizer)
        options, precision = self._options, self._precision
        if options.clip_norm is not None or options.clip_value is not None:
            precision.unscale(optimizer)
            parameters = precision.parameters(optimizer)
            if options.clip_value is not None:
                nn.utils.clip_grad_value_(parameters, options.clip_value)
            if options.clip_norm is not None:
                nn.utils.clip_grad_norm_(parameters, options.clip_norm)
        precision.step(optimizer)

    def stepped(self) -> None:
        """An optimizer stepped, by whatever hand."""
        if not self._closing:
            raise ConfigError(
                f"accumulate={self._options.accumulate} was asked for, but this operator steps its optimizer itself "
                "after every batch: use self.zero_grad(), self.backward(loss) and self.step(optimizer), which know the "
                "window, or leave accumulate out"
            )

    def _sync(self, on: bool) -> None:
        """Inner batches keep their gradients to themselves: one all-reduce per window."""
        self._parts.exchange.hold(not on)
        for model in self._parts.wrapped:
            if hasattr(model, "require_backward_grad_sync"):
                model.require_backward_grad_sync = on  # type: ignore[assignment]
            elif hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(on)  # type: ignore[operator]

    def _remember_witness(self, optimizer: Any) -> None:
        parameters = self._precision.parameters(optimizer)
        self._witness = next((each for each in parameters if each.grad is not None), None)

    def _look_for_witness(self) -> None:
        if self._position and self._witness is not None and self._witness.grad is None:
            raise ConfigError(
                f"gradients were cleared in the middle of {self._options.accumulate} batches that share one step: call "
                "self.zero_grad() instead of optimizer.zero_grad(), which knows when they may be cleared"
            )


def _scale(gradients: Sequence[torch.Tensor | None], factor: float) -> None:
    multiply_all([each for each in gradients if each is not None], factor)


def samples_in(batch: Any) -> int:
    """How many samples a batch holds: the length of the first tensor in it (1 where there is none)."""
    return _length(batch) or 1


def _length(part: Any) -> int | None:
    if isinstance(part, torch.Tensor):
        return part.shape[0] if part.dim() else None
    if isinstance(part, Mapping):
        part = list(part.values())
    if isinstance(part, (list, tuple)):
        return next((length for each in part if (length := _length(each)) is not None), None)
    return None
