"""Where `self.log` of a LightningModule writes while raysgd trains it."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Number
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from raysgd.constants import NUM_SAMPLES
from raysgd.errors import ConfigError

__all__ = ["Logbook"]


class Logbook:
    """Keeps what was logged: in a batch, outside of batches, and metric objects, computed at the end.

    The names in `log` are Lightning's. When and where a figure shows (`on_step`, `prog_bar`, `logger`) is not
    the module's business here: everything is reported by the trainer's call, as a mean weighted by samples.
    """

    def __init__(self, module: nn.Module) -> None:
        self._paths = {id(part): path for path, part in module.named_modules() if _is_metric(part)}
        self._parts = {path: part for path, part in module.named_modules() if id(part) in self._paths}
        self._batch: dict[str, Any] | None = None
        self._samples: int | None = None
        self._logged_metrics: dict[str, str] = {}
        self.figures: dict[str, Any] = {}
        self.rank = 0

    def open(self, rank: int) -> None:
        """A call of the trainer begins."""
        self.rank, self.figures, self._batch = rank, {}, None

    def open_batch(self) -> None:
        self._batch, self._samples = {}, None

    def close_batch(self, measured: Mapping[str, Any]) -> dict[str, Any]:
        """The batch's figures: those `measured` by the loop, and those logged. A logged batch_size counts."""
        figures = {**measured, **(self._batch or {})}
        if self._samples is not None:
            figures[NUM_SAMPLES] = self._samples
        self._batch = None
        return figures

    def settle(self) -> dict[str, Any]:
        """Computes and resets the logged metric objects; returns all but the batches' figures.

        Every rank calls it at the same places. One without a batch has logged nothing: names are agreed on.
        """
        if self._parts and dist.is_initialized() and dist.get_world_size() > 1:
            told: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(told, self._logged_metrics)
            self._logged_metrics = {name: path for each in reversed(told) for name, path in each.items()}
        for name, path in sorted(self._logged_metrics.items()):
            self.figures[name] = self._parts[path].compute()
        for path in set(self._logged_metrics.values()):
            self._parts[path].reset()
        self._logged_metrics = {}
        return self.figures

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
        """What `self.log` is while a module is trained here."""
        if reduce_fx not in ("mean", "avg", torch.mean):
            raise ConfigError(
                f"self.log({name!r}, reduce_fx={reduce_fx!r}) is not supported: figures are averaged ('mean')"
            )
        if rank_zero_only and self.rank != 0:
            return
        if _is_metric(value):
            self._log_metric(name, value, metric_attribute)
            return
        figure = _figure(name, value)
        if self._batch is None:
            self.figures[name] = figure
            return
        self._batch[name] = figure
        if batch_size is not None:
            if self._samples not in (None, batch_size):
                raise ConfigError(
                    f"self.log({name!r}, batch_size={batch_size}): the same batch was logged with batch_size="
                    f"{self._samples}, and a batch has one number of samples"
                )
            self._samples = batch_size

    def _log_metric(self, name: str, metric: Any, attribute: str | None) -> None:
        path = attribute or self._paths.get(id(metric), "")
        if path not in self._parts:
            raise ConfigError(
                f"self.log({name!r}, {type(metric).__name__}) needs a metric that is an attribute of the "
                "module since its __init__ or setup"
            )
        self._logged_metrics[name] = path


def _is_metric(value: Any) -> bool:
    """A TorchMetrics object, known by what is done with it: this library does not need the package."""
    return isinstance(value, nn.Module) and all(
        callable(getattr(value, each, None)) for each in ("compute", "reset", "update")
    )


def _figure(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach().clone()
    if isinstance(value, Number):
        return value
    shown = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    raise ConfigError(f"self.log({name!r}, ...) takes a number, a tensor of one element or a metric, got {shown}")
