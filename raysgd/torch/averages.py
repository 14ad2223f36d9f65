"""The exponential moving average of the weights, for `raysgd.callbacks.EMA`. Worker."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from raysgd.errors import ConfigError
from raysgd.torch.foreign import was_skipped
from raysgd.torch.fsdp import placed


class Averages:
    """Owns the average of each parameter that an optimizer has stepped. Without a decay there are
    none.

    An average begins as a copy of the weights after the first step, as in torch's `AveragedModel`.
    Each later step of the parameter's optimizer changes it; batches without a step, and steps that
    are skipped because gradients overflowed, do not.
    """

    def __init__(self, decay: float | None = None) -> None:
        self.on = decay is not None
        self._update = get_ema_multi_avg_fn(decay) if decay is not None else None
        self._models: list[nn.Module] = []
        self._averages: dict[torch.Tensor, torch.Tensor] = {}

    def watch(self, models: list[nn.Module], optimizers: Sequence[Any], *, precision: str | None) -> None:
        """Follow the steps of these optimizers."""
        if not self.on:
            return
        if precision == "apex":
            raise ConfigError(
                "EMA cannot follow precision='apex', which steps copies of the weights: use 'fp16' or 'bf16'"
            )
        self._models = models
        for optimizer in optimizers:
            if not hasattr(optimizer, "register_step_post_hook"):
                raise ConfigError(
                    f"EMA follows the steps of torch optimizers, got a {type(optimizer).__name__}, which has no "
                    "register_step_post_hook: make it a subclass of torch.optim.Optimizer, or leave EMA out"
                )
            optimizer.register_step_post_hook(self._stepped)

    @torch.no_grad()
    def _stepped(self, optimizer: Any, *_: Any) -> None:
        if was_skipped(optimizer):
            return
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        known = [parameter for parameter in stepped if parameter in self._averages]
        if known and self._update is not None:
            self._update(_local([self._averages[each] for each in known]), _local(known), 0)
        if len(known) < len(stepped):
            models = {parameter for model in self._models for parameter in model.parameters()}
            self._averages |= {
                each: each.detach().clone() for each in stepped if each in models and each not in self._averages
            }

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which models have the averaged weights, and their own buffers."""
        live, averages = _local(list(self._averages)), _local(list(self._averages.values()))
        kept = [each.clone() for each in live]
        try:
            _copy(averages, live)
            yield
        finally:
            _copy(kept, live)

    def state(self) -> list[dict[str, torch.Tensor]]:
        """The averages of each model, by parameter name."""
        return [
            {name: self._averages[each] for name, each in model.named_parameters() if each in self._averages}
            for model in self._models
        ]

    def load(self, saved: Sequence[Mapping[str, torch.Tensor]] | None) -> None:
        """Load what `state` returned; None begins again. The present averages do not change."""
        self._averages = {}
        for model, values in zip(self._models, saved or (), strict=False):
            own = dict(model.named_parameters())
            for name, value in placed(dict(values), own).items():
                self._averages[own[name]] = own[name].detach().clone().copy_(value)


def _local(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors that share memory with these; of sharded ones, this rank's shards."""
    return [each.to_local() if hasattr(each, "to_local") else each for each in (one.detach() for one in tensors)]


def _copy(source: list[torch.Tensor], target: list[torch.Tensor]) -> None:
    for one, other in zip(source, target, strict=True):
        other.copy_(one)
