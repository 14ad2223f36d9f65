"""The options of a TorchTrainer that RaySGD did not have. Both."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Literal, get_args

import torch
from torch.nn.parallel import DistributedDataParallel

from raysgd import config
from raysgd.errors import ConfigError, suggesting_fields

PrecisionName = Literal["fp32", "fp16", "bf16", "apex"]
ParallelName = Literal["auto", "ddp", "fsdp"]
GradientsName = Literal["samples", "ranks"]
NonFiniteName = Literal["skip", "raise"]
HookName = Literal["fp16", "bf16", "powersgd", "batched_powersgd"]
# What raysgd passes to DistributedDataParallel and PowerSGD itself.
SUPPLIED = {"self", "module", "device_ids", "process_group"}

POWERSGD, NO_DDP = ("powersgd", "batched_powersgd"), ("fsdp", None)
EXCLUDED: config.Exclusions = (
    (
        {"precision": ("apex",), "compile": bool},
        "Apex replaces functions that the compiler needs to read: use 'fp16' or 'bf16'",
    ),
    (
        {"read_ahead": (False,), "accumulate": (1).__lt__},
        "a step must know which batch is its last, and for that reads the next one: leave one of them out",
    ),
    (
        {"on_nonfinite": bool, "precision": ("apex",)},
        "Apex finds its scale through infinite gradients: use 'bf16' or 'fp32', or on_nonfinite='skip' with 'fp16'",
    ),
    (
        {"on_nonfinite": ("raise",), "precision": ("fp16",)},
        "fp16 finds its scale through infinite gradients: use 'bf16', or on_nonfinite='skip'",
    ),
    (
        {"on_nonfinite": bool, "comm_hook": POWERSGD},
        "PowerSGD adds each error to the next step, and never recovers from a gradient that is not finite: leave one of them out",
    ),
    (
        {"ddp_args": bool, "parallel": NO_DDP},
        "ddp_args are for DistributedDataParallel: leave them out, or pass parallel='ddp'",
    ),
    (
        {"comm_hook": bool, "parallel": NO_DDP},
        "comm_hook is for DistributedDataParallel: leave it out, or pass parallel='ddp'",
    ),
    (
        {"parallel": ("fsdp",), "channels_last": bool},
        "FSDP cuts parameters into contiguous shards: leave channels_last out",
    ),
    (
        {"parallel": ("fsdp",), "precision": ("fp16", "apex")},
        "each worker sees the gradients of its shard only, so they could not agree on skipping a step: use 'fp32' or 'bf16'",
    ),
)


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
        accumulate      batches per optimizer step; self.backward(loss) gets the loss of each batch, not divided
        gradients       "samples": a step's gradient is the mean over its samples, also if the ranks have different numbers of
                        them; "ranks": it is the mean over the ranks of their means, as DistributedDataParallel computes it
        clip_norm       largest norm of all gradients of an optimizer together; None: no clipping
        clip_value      largest absolute value of each gradient; None: no clipping
        on_nonfinite    what to do with a step whose gradients are infinite or NaN: "skip": no rank makes it; "raise": all ranks
                        raise NonFiniteError; None (the default): it is not checked
        read_ahead      False: a batch is read when the step before it is made, for data that the current weights make.
                        Otherwise, the next batch may be read before that, on GPUs always
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
    accumulate: int = 1
    gradients: GradientsName = "samples"
    clip_norm: float | None = None
    clip_value: float | None = None
    on_nonfinite: NonFiniteName | None = None
    read_ahead: bool = True
    compile: bool | Mapping[str, Any] = False
    channels_last: bool = False
    sync_batchnorm: bool = False
    ddp_args: Mapping[str, Any] = field(default_factory=dict)
    comm_hook: HookName | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        config.one_of("precision", self.precision, *get_args(PrecisionName), None)
        config.one_of("parallel", self.parallel, *get_args(ParallelName), None)
        config.one_of("gradients", self.gradients, *get_args(GradientsName))
        config.one_of("on_nonfinite", self.on_nonfinite, *get_args(NonFiniteName), None)
        config.at_least("accumulate", self.accumulate, 1, whole=True)
        for name, value in {"clip_norm": self.clip_norm, "clip_value": self.clip_value}.items():
            if value is not None and not (config.is_real(value) and value > 0):
                raise ConfigError(f"{name} must be a number above 0, or None for no clipping, got {value!r}")
        config.check_flags(
            read_ahead=self.read_ahead, channels_last=self.channels_last, sync_batchnorm=self.sync_batchnorm
        )
        if not isinstance(self.compile, bool):
            _check_arguments("compile", self.compile, torch.compile, {"model"}, allowed="True, False or a dict")
        _check_arguments("ddp_args", self.ddp_args, DistributedDataParallel.__init__, SUPPLIED)
        self._check_hook()
        config.refuse(EXCLUDED, vars(self) | {"comm_hook": self.hook_name})
        self.check_ddp(self.ddp_args)

    def _check_hook(self) -> None:
        name = self.hook_name
        config.one_of("comm_hook", name, *get_args(HookName), None)
        if name in ("fp16", "bf16") and self.hook_args:
            raise ConfigError(f"the comm_hook {name!r} takes no arguments, got {sorted(self.hook_args)}")
        if self.hook_args:
            power = import_module("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook").PowerSGDState
            _check_arguments("comm_hook", self.hook_args, power.__init__, SUPPLIED)
            try:
                power(process_group=None, **self.hook_args)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"comm_hook={self.comm_hook!r}: {error}") from error

    def check_ddp(self, arguments: Mapping[str, Any]) -> None:
        """Raise ConfigError for arguments of DistributedDataParallel that these options cannot be
        combined with."""
        if arguments.get("static_graph") and self.accumulate > 1:
            raise ConfigError(
                "ddp_args={'static_graph': True} cannot be combined with accumulate: DDP learns the graph from the first batch, and "
                "must exchange gradients in it. Leave one of them out"
            )

    @staticmethod
    def checked(options: object) -> TrainingOptions:
        """A trainer's `options`, for None the default ones. Raise ConfigError for others."""
        return config.object_of(TrainingOptions, "options", options) or TrainingOptions()

    def resolved(self, *, wrap_ddp: Any = None, use_fp16: Any = None) -> TrainingOptions:
        """The options with a definite `parallel` and `precision`. RaySGD's names for them,
        `wrap_ddp` and `use_fp16`, decide where the options do not. Raise ConfigError if both were
        passed and differ."""
        return replace(self, parallel=self._parallel_with(wrap_ddp), precision=self._precision_with(use_fp16))

    def _parallel_with(self, wrap_ddp: Any) -> ParallelName | None:
        if wrap_ddp is not None:
            config.check_flags(wrap_ddp=wrap_ddp)
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
        """The name of `comm_hook`."""
        return self.comm_hook.get("name", "") if isinstance(self.comm_hook, Mapping) else self.comm_hook

    @property
    def hook_args(self) -> dict[str, Any]:
        """The arguments of `comm_hook`, without its name."""
        arguments = self.comm_hook if isinstance(self.comm_hook, Mapping) else {}
        return {name: value for name, value in arguments.items() if name != "name"}


def _check_arguments(name: str, arguments: Any, function: Any, supplied: set[str], *, allowed: str = "a dict") -> None:
    legal = sorted(inspect.signature(function).parameters.keys() - supplied)
    if not isinstance(arguments, Mapping):
        raise ConfigError(f"{name} must be {allowed} of keyword arguments, got {arguments!r}")
    unknown = sorted(arguments.keys() - set(legal))
    if unknown:
        raise ConfigError(f"{name} has no {unknown}; it takes {legal}")
