"""What `self.log` of a LightningModule does while raysgd trains the module. Worker."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Number
from typing import Any

import torch

from raysgd.constants import NUM_SAMPLES
from raysgd.errors import ConfigError
from raysgd.torch.lightning.module import INSTEAD


class LoggedValues:
    """Owns what a module logs in one call of the trainer: values of the current batch, and values
    outside of batches.

    `log` has the parameters of Lightning's `self.log`. Those that say when and where a value is
    shown (`on_step`, `prog_bar`, `logger`) have no effect: the trainer's call reports every value
    as a mean weighted by samples.
    """

    def __init__(self) -> None:
        self._batch: dict[str, Any] | None = None
        self._samples: int | None = None
        self.outside_batches: dict[str, Any] = {}
        self._rank = 0

    def begin_call(self, rank: int) -> None:
        self._rank, self.outside_batches, self._batch = rank, {}, None

    def begin_batch(self) -> None:
        self._batch, self._samples = {}, None

    def end_batch(self, measured: Mapping[str, Any]) -> dict[str, Any]:
        """Collect the batch's values: those that the loop `measured`, and those that were logged. A
        logged `batch_size` replaces the number of samples."""
        values = {**measured, **(self._batch or {})}
        if self._samples is not None:
            values[NUM_SAMPLES] = self._samples
        self._batch = None
        return values

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Replace `self.log` of the module."""
        if reduce_fx not in ("mean", "avg", torch.mean):
            raise ConfigError(
                f"self.log({name!r}, reduce_fx={reduce_fx!r}) is not supported, because raysgd averages logged values: "
                f"{INSTEAD}"
            )
        if rank_zero_only and self._rank != 0:
            return
        scalar = _scalar(name, value)
        if self._batch is None:
            self.outside_batches[name] = scalar
            return
        self._batch[name] = scalar
        if batch_size is not None:
            if self._samples not in (None, batch_size):
                raise ConfigError(
                    f"self.log({name!r}, batch_size={batch_size}): an earlier call for this batch had batch_size="
                    f"{self._samples}; pass the same batch_size in all calls for one batch"
                )
            self._samples = batch_size


def is_number(value: Any) -> bool:
    return isinstance(value, Number) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _scalar(name: str, value: Any) -> Any:
    if is_number(value):
        return value.detach().clone() if isinstance(value, torch.Tensor) else value
    shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    raise ConfigError(
        f"self.log({name!r}, ...) takes a number or a tensor with one element, got {shown}. For metric objects, {INSTEAD}"
    )
