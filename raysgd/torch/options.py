"""The options of a TorchTrainer that RaySGD did not have: precision, wrapping, accumulation,
clipping, compiling. Both."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Literal, get_args

import torch
from torch.nn.parallel import DistributedDataParallel

from raysgd.config import ElasticConfig, at_least, check_flag, is_real, refuse_comparison
from raysgd.errors import ConfigError, suggesting_fields

PrecisionName = Literal["fp32", "fp16", "bf16", "apex"]
ParallelName = Literal["auto", "ddp", "fsdp"]
GradientsName = Literal["samples", "ranks"]
NonFiniteName = Literal["skip", "raise"]
HookName = Literal["fp16", "bf16", "powersgd", "batched_powersgd"]
# What raysgd passes to DistributedDataParallel and PowerSGD itself.
SUPPLIED = {"self", "module", "device_ids", "process_group"}


@suggesting_fields
@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How a `TorchTrainer` trains its models.

        options = TrainingOptions(precision="bf16", accumulate=4, clip_norm=1.0)
        trainer = TorchTrainer(training_operator_cls=Digits, num_workers=2, options=options)

    Fields, all by keyword:

        precision       "fp32", "fp16", "bf16" or "apex"; None (the default): what the trainer's `use_fp16` says, or "fp32"
        parallel        "ddp": every worker holds the model; "fsdp": each holds a part of it; None: models are not
                        wrapped, and you average the gradients; "auto" (the default): "ddp", or None with `wrap_ddp=False`
        replicas        with "fsdp": on how many workers each shard is; `num_workers` must be a multiple of it
        accumulate      batches per optimizer step
        gradients       "samples": a step's gradient is the mean over its samples, also if the ranks have different numbers of
                        them; "ranks": it is the mean over the ranks of their means, as DistributedDataParallel computes it
        clip_norm       largest norm of all gradients of an optimizer together; None: no clipping
        clip_value      largest absolute value of each gradient; None: no clipping
        on_nonfinite    what to do with a step whose gradients are infinite or NaN: "skip": no rank makes it; "raise": all ranks
                        raise NonFiniteError; None (the default): it is not checked
        compile         True, or arguments of `torch.compile`, such as {"mode": "max-autotune"}; compiles each model
        channels_last   keep models and batches of images in the memory format that GPUs prefer for convolutions
        sync_batchnorm  BatchNorm layers use the statistics of all workers (on GPUs only)
        ddp_args        arguments of DistributedDataParallel for every model; those of `register` take precedence
        comm_hook       how DDP sends gradients: "fp16", "bf16", "powersgd", "batched_powersgd", or a dict with `name` and
                        the arguments of PowerSGD

    Raises ConfigError for values that are not possible, and for fields that cannot be combined.
    """

    precision: PrecisionName | None = None
    parallel: ParallelName | None = "auto"
    replicas: int = 1
    accumulate: int = 1
    gradients: GradientsName = "samples"
    clip_norm: float | None = None
    clip_value: float | None = None
    on_nonfinite: NonFiniteName | None = None
    compile: bool | Mapping[str, Any] = False
    channels_last: bool = False
    sync_batchnorm: bool = False
    ddp_args: Mapping[str, Any] = field(default_factory=dict)
    comm_hook: HookName | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.precision is not None and self.precision not in get_args(PrecisionName):
            raise ConfigError(f"precision must be 'fp32', 'fp16', 'bf16' or 'apex', got {self.precision!r}")
        if self.parallel is not None and self.parallel not in get_args(ParallelName):
            raise ConfigError(f"parallel must be 'auto', 'ddp', 'fsdp' or None, got {self.parallel!r}")
        if self.gradients not in get_args(GradientsName):
            raise ConfigError(f"gradients must be 'samples' or 'ranks', got {self.gradients!r}")
        if self.on_nonfinite is not None and self.on_nonfinite not in get_args(NonFiniteName):
            raise ConfigError(f"on_nonfinite must be 'skip', 'raise' or None, got {self.on_nonfinite!r}")
        at_least("accumulate", self.accumulate, 1, whole=True)
        at_least("replicas", self.replicas, 1, whole=True)
        if self.replicas > 1 and self.parallel != "fsdp":
            raise ConfigError(
                f"replicas={self.replicas} is the number of copies of each shard, but parallel is {self.parallel!r}: pass "
                "parallel='fsdp', or leave replicas out"
            )
        for name in ("clip_norm", "clip_value"):
            value = getattr(self, name)
            if value is not None and not (is_real(value) and value > 0):
                raise ConfigError(f"{name} must be a number above 0, or None for no clipping, got {value!r}")
        for name in ("channels_last", "sync_batchnorm"):
            check_flag(name, getattr(self, name))
        if not isinstance(self.compile, bool):
            _check_arguments("compile", self.compile, torch.compile, {"model"}, allowed="True, False or a dict")
        _check_arguments("ddp_args", self.ddp_args, DistributedDataParallel.__init__, SUPPLIED)
        self._check_hook()
        self._check_together()

    def _check_hook(self) -> None:
        name, legal = self.hook_name, get_args(HookName)
        if name is not None and name not in legal:
            raise ConfigError(f"comm_hook must be one of {', '.join(map(repr, legal))} or None, got {name!r}")
        if name in ("fp16", "bf16") and self.hook_args:
            raise ConfigError(f"the comm_hook {name!r} takes no arguments, got {sorted(self.hook_args)}")
        if self.hook_args:
            power = import_module("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook").PowerSGDState
            _check_arguments("comm_hook", self.hook_args, power.__init__, SUPPLIED)
            try:
                power(process_group=None, **self.hook_args)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"comm_hook={self.comm_hook!r}: {error}") from error

    def _check_together(self) -> None:
        self.check_ddp(self.ddp_args)
        if self.precision == "apex" and self.compile:
            raise ConfigError("precision='apex' replaces functions that compile needs to read: use 'fp16' or 'bf16'")
        self._check_nonfinite()
        if self.parallel in ("auto", "ddp"):
            return
        for name in ("ddp_args", "comm_hook"):
            if getattr(self, name):
                raise ConfigError(
                    f"{name} is for DistributedDataParallel, but parallel is {self.parallel!r}: leave one out"
                )
        if self.parallel == "fsdp" and self.channels_last:
            raise ConfigError("parallel='fsdp' cuts parameters into contiguous shards: it cannot keep channels_last")
        if self.parallel == "fsdp" and self.precision in ("fp16", "apex"):
            raise ConfigError(
                f"parallel='fsdp' needs precision 'fp32' or 'bf16', got {self.precision!r}: each worker sees the "
                "gradients of its shard only, so they could not agree on skipping a step"
            )

    def _check_nonfinite(self) -> None:
        if self.on_nonfinite is None:
            return
        if self.precision == "apex" or (self.precision == "fp16" and self.on_nonfinite == "raise"):
            raise ConfigError(
                f"on_nonfinite={self.on_nonfinite!r} cannot be combined with precision={self.precision!r}, which finds its scale through "
                "infinite gradients and skips these steps: use 'bf16' or 'fp32', or on_nonfinite='skip' with 'fp16'"
            )
        if self.hook_name in ("powersgd", "batched_powersgd"):
            raise ConfigError(
                f"comm_hook={self.hook_name!r} adds the error of each step to the next one, so it never recovers from a gradient that "
                "is not finite: leave out comm_hook or on_nonfinite"
            )

    def check_ddp(self, arguments: Mapping[str, Any], *, pieces: bool = False) -> None:
        """Raise ConfigError for arguments of DistributedDataParallel that these options cannot be
        combined with. `pieces` is whether a batch may be processed in several pieces."""
        if arguments.get("static_graph") and (self.accumulate > 1 or pieces):
            other = "accumulate" if self.accumulate > 1 else "ElasticConfig(batch='global')"
            raise ConfigError(
                f"ddp_args={{'static_graph': True}} cannot be combined with {other}: DDP learns the graph from the first batch, and "
                "must exchange gradients in it. Leave one of them out"
            )

    def check_with(self, *, num_workers: int, use_gpu: bool, elastic: ElasticConfig) -> None:
        """Raise ConfigError for other arguments of the trainer that these options cannot be
        combined with."""
        self.check_ddp(self.ddp_args, pieces=elastic.batch == "global" and num_workers > 1)
        if self.sync_batchnorm and num_workers > 1 and not use_gpu:
            raise ConfigError(
                "sync_batchnorm=True needs GPUs (torch has no SyncBatchNorm for CPUs): pass use_gpu=True, or leave it out"
            )
        if self.hook_name == "bf16" and num_workers > 1 and not use_gpu:
            raise ConfigError("comm_hook='bf16' needs GPUs (torch has it for NCCL only): use 'fp16', or leave it out")
        if self.parallel is None and num_workers > 1 and self.on_nonfinite is not None:
            raise ConfigError(
                f"on_nonfinite={self.on_nonfinite!r} cannot be combined with parallel=None: raysgd does not know when you have averaged "
                "the gradients. Leave it out, or let raysgd average them"
            )
        if self.precision == "apex" and self.accumulate > 1 and num_workers > 1:
            raise ConfigError(
                "precision='apex' keeps the gradients of earlier batches where DDP does not see them, so accumulate "
                "cannot exchange them all at once: use 'fp16' or 'bf16', or leave accumulate out"
            )
        if elastic.batch == "global" and num_workers > 1 and (self.gradients == "ranks" or self.parallel is None):
            given = "gradients='ranks'" if self.gradients == "ranks" else "parallel=None"
            raise ConfigError(
                "ElasticConfig(batch='global') keeps the gradients of steps the same when workers leave, which needs gradients "
                f"that raysgd averages over samples, and {given} excludes that: leave one of them out"
            )
        if num_workers > 1:
            self._check_comparison(elastic)
        if self.parallel == "fsdp" and isinstance(elastic.snapshot_every, float):
            raise ConfigError(
                "with parallel='fsdp' all workers make a snapshot together, and their clocks differ: set "
                f"snapshot_every to 'epoch', a number of batches or None, got {elastic.snapshot_every!r} seconds"
            )
        if num_workers % self.replicas:
            raise ConfigError(
                f"replicas={self.replicas} needs a number of workers that is a multiple of it, got num_workers={num_workers}: each of the "
                "copies of the model is divided among equally many workers"
            )

    def _check_comparison(self, elastic: ElasticConfig) -> None:
        if self.parallel is None:
            refuse_comparison(elastic, "with parallel=None raysgd does not know whether they should be equal")
        if self.parallel == "fsdp" and elastic.on_divergence == "evict":
            raise ConfigError(
                "on_divergence='evict' needs ranks with equal weights, and with parallel='fsdp' each has its own shard: use 'warn' or "
                "'raise'"
            )

    @staticmethod
    def checked(options: object) -> TrainingOptions:
        """Return a trainer's `options`, or the default ones for None. Raise ConfigError for any
        other object."""
        if options is not None and not isinstance(options, TrainingOptions):
            raise ConfigError(f"options must be a raysgd.TrainingOptions, got {options!r}")
        return options or TrainingOptions()

    def resolved(self, *, wrap_ddp: Any = None, use_fp16: Any = None) -> TrainingOptions:
        """Return the options with a definite `parallel` and `precision`. RaySGD's names for them,
        `wrap_ddp` and `use_fp16`, decide where the options do not. Raise ConfigError if both were
        passed and differ."""
        return replace(self, parallel=self._parallel_with(wrap_ddp), precision=self._precision_with(use_fp16))

    def _parallel_with(self, wrap_ddp: Any) -> ParallelName | None:
        if wrap_ddp is not None:
            check_flag("wrap_ddp", wrap_ddp)
        older: ParallelName | None = None if wrap_ddp is False else "ddp"
        if self.parallel == "auto":
            return older
        if wrap_ddp is not None and self.parallel != older:
            raise ConfigError(
                f"wrap_ddp={wrap_ddp} means parallel={older!r}, but options.parallel is {self.parallel!r}: pass one"
            )
        return self.parallel

    def _precision_with(self, use_fp16: Any) -> PrecisionName:
        if use_fp16 not in (None, True, False, "apex"):
            raise ConfigError(f"use_fp16 must be False, True or 'apex', got {use_fp16!r}")
        older: PrecisionName = "apex" if use_fp16 == "apex" else "fp16" if use_fp16 else "fp32"
        if self.precision is None:
            return older
        same = self.precision == older or (not use_fp16 and self.precision == "bf16")
        if use_fp16 is not None and not same:
            raise ConfigError(
                f"use_fp16={use_fp16!r} means precision={older!r}, but options.precision is {self.precision!r}: pass one"
            )
        return self.precision

    @property
    def hook_name(self) -> str | None:
        """Return the name of `comm_hook`."""
        return self.comm_hook.get("name", "") if isinstance(self.comm_hook, Mapping) else self.comm_hook

    @property
    def hook_args(self) -> dict[str, Any]:
        """Return the arguments of `comm_hook`, without its name."""
        given = self.comm_hook if isinstance(self.comm_hook, Mapping) else {}
        return {name: value for name, value in given.items() if name != "name"}


def _check_arguments(name: str, given: Any, function: Any, supplied: set[str], *, allowed: str = "a dict") -> None:
    legal = sorted(inspect.signature(function).parameters.keys() - supplied)
    if not isinstance(given, Mapping):
        raise ConfigError(f"{name} must be {allowed} of keyword arguments, got {given!r}")
    unknown = sorted(given.keys() - set(legal))
    if unknown:
        raise ConfigError(f"{name} has no {unknown}; it takes {legal}")
