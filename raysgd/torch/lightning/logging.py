"""What `self.log` of a LightningModule does while raysgd trains the module. Worker."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Number
from typing import Any

import torch
from torch import nn

from raysgd.constants import NUM_SAMPLES
from raysgd.core.control import Control
from raysgd.errors import ConfigError
from raysgd.torch.skipped_steps import gathered_objects


class LoggedValues:
    """Owns what a module logs in one call of the trainer: values of the current batch, values
    outside of batches, and metric objects, which are computed at the end.

    `log` has the parameters of Lightning's `self.log`. Those that say when and where a value is
    shown (`on_step`, `prog_bar`, `logger`) have no effect: the trainer's call reports every value
    as a mean weighted by samples.
    """

    def __init__(self, module: nn.Module) -> None:
        self._paths = {id(part): path for path, part in module.named_modules() if _is_metric(part)}
        self._metrics = {path: part for path, part in module.named_modules() if id(part) in self._paths}
        self._batch: dict[str, Any] | None = None
        self._samples: int | None = None
        self._logged_metrics: dict[str, str] = {}
        self._outside_batches: dict[str, Any] = {}
        self._rank = 0

    def begin_call(self, rank: int, *, new: bool) -> None:
        """Begin a call, or the rest of one. If it is `new`, what is logged already is of a call
        that did not come to its end."""
        self._rank, self._outside_batches, self._batch = rank, {}, None
        if new:
            self._reset()

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

    def computed(self, control: Control, *, resets: bool = True) -> dict[str, Any]:
        """Compute the logged metric objects, and reset them unless the call continues. Return their
        values, and those that were logged outside of batches.

        Every rank must call this at the same points. A rank that had no batch has logged nothing,
        so the ranks exchange the names first.
        """
        if self._metrics:
            by_rank = gathered_objects(self._logged_metrics, control)
            self._logged_metrics = {name: path for each in reversed(by_rank) for name, path in each.items()}
        for name, path in sorted(self._logged_metrics.items()):
            self._outside_batches[name] = self._metrics[path].compute()
        if resets:
            self._reset()
        return self._outside_batches

    def _reset(self) -> None:
        for path in set(self._logged_metrics.values()):
            self._metrics[path].reset()
        self._logged_metrics = {}

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
                f"self.log({name!r}, reduce_fx={reduce_fx!r}) is not supported: raysgd averages logged values, so use "
                "reduce_fx='mean', or log a TorchMetrics object that reduces its values itself"
            )
        if rank_zero_only and self._rank != 0:
            return
        if _is_metric(value):
            self._log_metric(name, value, metric_attribute)
            return
        scalar = _scalar(name, value)
        if self._batch is None:
            self._outside_batches[name] = scalar
            return
        self._batch[name] = scalar
        if batch_size is not None:
            if self._samples not in (None, batch_size):
                raise ConfigError(
                    f"self.log({name!r}, batch_size={batch_size}): an earlier call for this batch had batch_size="
                    f"{self._samples}; pass the same batch_size in all calls for one batch"
                )
            self._samples = batch_size

    def _log_metric(self, name: str, metric: Any, attribute: str | None) -> None:
        path = attribute or self._paths.get(id(metric), "")
        if path not in self._metrics:
            raise ConfigError(
                f"self.log({name!r}, {type(metric).__name__}): this metric is not an attribute of the module; assign it to "
                "one in the module's __init__ or setup"
            )
        self._logged_metrics[name] = path


def _is_metric(value: Any) -> bool:
    """Whether this is a TorchMetrics object, by its methods: no import is needed."""
    return isinstance(value, nn.Module) and all(
        callable(getattr(value, each, None)) for each in ("compute", "reset", "update")
    )


def _scalar(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach().clone()
    if isinstance(value, Number):
        return value
    shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    raise ConfigError(f"self.log({name!r}, ...) takes a number, a tensor with one element or a metric; got {shown}")
