"""A TorchTrainer's options for wrapping, accumulation and clipping. Both."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from raysgd.config import ElasticConfig
from raysgd.errors import ConfigError

__all__ = ["COMM_HOOKS", "TrainingOptions"]

COMM_HOOKS = ("fp16", "bf16", "powersgd", "batched_powersgd")
PARALLEL = ("ddp", "fsdp", None)
SUPPLIED = {"self", "module", "device_ids", "process_group"}


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """Arguments of `TorchTrainer`, which describes them. Raises ConfigError for values that are not
    possible.
    """

    accumulate: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    compile: bool | Mapping[str, Any] = False
    channels_last: bool = False
    sync_batchnorm: bool = False
    ddp_args: Mapping[str, Any] = field(default_factory=dict)
    comm_hook: str | Mapping[str, Any] | None = None
    parallel: str | None = "ddp"

    def __post_init__(self) -> None:
        if not isinstance(self.accumulate, int) or isinstance(self.accumulate, bool) or self.accumulate < 1:
            raise ConfigError(f"accumulate must be a whole number of batches, 1 or more, got {self.accumulate!r}")
        for name in ("clip_norm", "clip_value"):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and value > 0):
                raise ConfigError(f"{name} must be a number above 0, or None for no clipping, got {value!r}")
        for name in ("channels_last", "sync_batchnorm"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.parallel not in PARALLEL:
            raise ConfigError(f"parallel must be 'ddp', 'fsdp' or None, got {self.parallel!r}")
        _check_arguments("compile", self.compile, torch.compile, {"model"})
        _check_arguments("ddp_args", self.ddp_args, DistributedDataParallel.__init__, SUPPLIED)
        self._check_hook()
        self._check_together()

    def _check_hook(self) -> None:
        name = self.hook_name
        if name is not None and name not in COMM_HOOKS:
            raise ConfigError(f"comm_hook must be one of {', '.join(map(repr, COMM_HOOKS))} or None, got {name!r}")
        if name in ("fp16", "bf16") and self.hook_args:
            raise ConfigError(f"the comm_hook {name!r} takes no arguments, got {sorted(self.hook_args)}")
        if self.hook_args:
            power = import_module("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook").PowerSGDState
            _check_arguments("comm_hook", self.hook_args, power.__init__, SUPPLIED)
            try:
                power(process_group=None, **self.hook_args)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"comm_hook={dict(self.comm_hook)!r}: {error}") from error  # type: ignore[arg-type]

    def _check_together(self) -> None:
        self.check_ddp(self.ddp_args)
        if self.parallel == "ddp":
            return
        for name in ("ddp_args", "comm_hook"):
            if getattr(self, name):
                raise ConfigError(
                    f"{name} is for DistributedDataParallel, but parallel is {self.parallel!r}: leave one out"
                )
        if self.parallel == "fsdp" and self.channels_last:
            raise ConfigError("parallel='fsdp' cuts parameters into contiguous shards: it cannot keep channels_last")

    def check_ddp(self, arguments: Mapping[str, Any]) -> None:
        if self.accumulate > 1 and arguments.get("static_graph"):
            raise ConfigError(
                "ddp_args={'static_graph': True} cannot be combined with accumulate: DDP learns the graph from the first "
                "batch, and must exchange gradients in it. Leave one of them out"
            )

    def check_with(self, *, num_workers: int, use_gpu: bool, precision: str, elastic: ElasticConfig) -> None:
        """Raise ConfigError for other arguments that these options cannot be combined with."""
        if self.sync_batchnorm and num_workers > 1 and not use_gpu:
            raise ConfigError(
                "sync_batchnorm=True needs GPUs (torch has no SyncBatchNorm for CPUs): pass use_gpu=True, or leave it"
            )
        if self.hook_name == "bf16" and num_workers > 1 and not use_gpu:
            raise ConfigError("comm_hook='bf16' needs GPUs (torch has it for NCCL only): use 'fp16', or leave it out")
        if precision == "apex" and self.accumulate > 1 and num_workers > 1:
            raise ConfigError(
                "precision='apex' keeps the gradients of earlier batches where DDP does not see them, so accumulate "
                "cannot exchange them all at once: use 'fp16' or 'bf16', or leave accumulate out"
            )
        if precision == "apex" and self.compile:
            raise ConfigError("precision='apex' replaces functions that compile needs to read: use 'fp16' or 'bf16'")
        if self.parallel == "fsdp" and precision in ("fp16", "apex"):
            raise ConfigError(
                f"parallel='fsdp' needs precision 'fp32' or 'bf16', got {precision!r}: each worker sees the "
                "gradients of its shard only, so they could not agree on skipping a step"
            )
        if self.parallel == "fsdp" and isinstance(elastic.snapshot_every, float):
            raise ConfigError(
                "with parallel='fsdp' all workers make a snapshot together, and their clocks differ: set "
                f"snapshot_every to 'epoch', a number of batches or None, got {elastic.snapshot_every!r} seconds"
            )

    @property
    def hook_name(self) -> str | None:
        return self.comm_hook.get("name", "") if isinstance(self.comm_hook, Mapping) else self.comm_hook

    @property
    def hook_args(self) -> dict[str, Any]:
        given = self.comm_hook if isinstance(self.comm_hook, Mapping) else {}
        return {name: value for name, value in given.items() if name != "name"}


def _check_arguments(name: str, given: Any, function: Any, supplied: set[str]) -> None:
    if isinstance(given, bool) and name == "compile":
        return
    legal = sorted(inspect.signature(function).parameters.keys() - supplied)
    if not isinstance(given, Mapping):
        kinds = "True, False or a dict" if name == "compile" else "a dict"
        raise ConfigError(f"{name} must be {kinds} of keyword arguments, got {given!r}")
    unknown = sorted(given.keys() - set(legal))
    if unknown:
        raise ConfigError(f"{name} has no {unknown}; it takes {legal}")
