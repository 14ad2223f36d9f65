"""What a replica of a TorchTrainer needs from its trainer, which decides it. Both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from raysgd.callbacks.torch_profiler import ProfilerSettings
from raysgd.config import Exclusions, at_least, check_flags, one_of, refuse, refuse_comparison
from raysgd.core.decisions.sampling_plan import Division
from raysgd.errors import ConfigError
from raysgd.replica.settings import ReplicaSettings
from raysgd.torch.group.wrapping import Exchange
from raysgd.torch.options import TrainingOptions

EXCLUDED_WITH_SEVERAL_WORKERS: Exclusions = (
    (
        {"name": bool, "parallel": ("fsdp",)},
        "each worker has only a part of a sharded model, which outlives its script in checkpoints. Leave out name, and pass "
        "checkpoints=AutoCheckpoint(...) and resume='auto'",
    ),
    (
        {"shares": ("speed",), "parallel": ("fsdp",)},
        "each forward pass of a sharded model needs all workers, so they make equally many. Leave shares out, or pass parallel='ddp'",
    ),
    (
        {"shares": ("speed",), "sync_batchnorm": bool},
        "SyncBatchNorm needs all workers in each forward pass, so they make equally many. Leave one of them out",
    ),
    (
        {"sync_batchnorm": bool, "use_gpu": (False,)},
        "torch has no SyncBatchNorm for CPUs: pass use_gpu=True, or leave it out",
    ),
    (
        {"comm_hook": ("bf16",), "use_gpu": (False,)},
        "torch has this hook for NCCL only, so for GPUs: use 'fp16', or leave it out",
    ),
    (
        {"on_nonfinite": bool, "parallel": (None,)},
        "raysgd does not know when you have averaged the gradients. Leave it out, or let raysgd average them",
    ),
    (
        {"precision": ("apex",), "accumulate": (1).__lt__},
        "Apex keeps the gradients of earlier batches where DDP does not see them, and cannot exchange them all at once: use 'fp16' or "
        "'bf16'",
    ),
)


@dataclass(frozen=True, kw_only=True)
class TorchSettings(ReplicaSettings):
    """Adds what only torch needs.

    options    those of the trainer, resolved
    dtype      the script's default type of tensors; None: each process has its own
    wrap_ddp   whether `register` wraps models in DistributedDataParallel
    rows       `rows(name, dataset, deliver)` opens the rows of a Ray Dataset that a worker has made
    exchange   makes the object that averages gradients if the models are not wrapped asynchronous
               whether collective calls return before the device has made them, as NCCL's do
    parts      into how many parts the trainer divides a batch; None: `num_workers`
    profiler   what TorchProfilerCallback wants to be recorded; None: nothing
    """

    options: TrainingOptions = field(default_factory=TrainingOptions)
    dtype: torch.dtype | None = None
    wrap_ddp: bool = True
    add_dist_sampler: bool = True
    scheduler_step_freq: str | None = None
    rows: Callable[..., Any] | None = None
    exchange: Callable[[], Exchange] = Exchange
    asynchronous: bool = False
    parts: int | None = None
    profiler: ProfilerSettings | None = None

    @property
    def all_parts(self) -> int:
        """Return how many parts a batch has if operators follow the contract."""
        return self.parts or self.num_workers

    def evaluation(self, ranks: int) -> Division:
        """Return how this many ranks divide a batch of an evaluation."""
        batches = max(ranks, self.num_workers)
        return Division(batches, batches)

    @property
    def adds_parts(self) -> bool:
        """Return whether a step can have several parts, on any workers."""
        return self.all_parts > 1 and not self.alone

    @property
    def in_parts(self) -> bool:
        """Return whether raysgd divides a batch of each operator that follows the contract."""
        return self.adds_parts and self.elastic.batch == "auto"

    @property
    def averages_gradients(self) -> bool:
        return self.adds_parts and self.options.parallel is not None

    @property
    def is_exact(self) -> bool:
        return self.averages_gradients and self.options.gradients == "samples"

    @property
    def divides_data(self) -> bool:
        """Whether raysgd divides the data, or one worker has all of it."""
        return self.add_dist_sampler or not self.distributed

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flags(use_tqdm=self.use_tqdm, add_dist_sampler=self.add_dist_sampler)
        one_of("scheduler_step_freq", self.scheduler_step_freq, "batch", "step", "epoch", "manual", None)

    def check(self, name: str | None, backend: str) -> None:
        """Raise ConfigError for options and arguments of the trainer that exclude each other."""
        workers, parts, options, elastic = self.num_workers, self.parts, self.options, self.elastic
        if parts is not None:
            at_least("parts", parts, workers, whole=True)
            if elastic.batch != "auto":
                raise ConfigError(
                    f"parts={parts} cannot be combined with batch={elastic.batch!r}: leave one of them out"
                )
        if elastic.shares == "speed" and (parts is None or parts <= workers):
            raise ConfigError(
                f"shares='speed' deals the parts of a batch, and each of {workers} workers has one at least: pass more of them, "
                f"TorchTrainer(parts={4 * workers}, ...)"
            )
        if elastic.shares == "speed" and backend == "horovod":
            raise ConfigError("shares='speed' cannot be combined with backend='horovod': leave one of them out")
        if not self.distributed:
            return
        hook = {"comm_hook": options.hook_name}
        refuse(EXCLUDED_WITH_SEVERAL_WORKERS, vars(options) | vars(elastic) | vars(self) | hook | {"name": name})
        if options.parallel is None:
            refuse_comparison(elastic, "with parallel=None raysgd does not know whether they should be equal")
        if options.parallel == "fsdp":
            refuse_comparison(elastic, "with parallel='fsdp' no two ranks have the same ones")
            if elastic.snapshot_every not in ("epoch", None):
                raise ConfigError(
                    f"snapshot_every={elastic.snapshot_every!r} has no effect with parallel='fsdp', because no process has the full state "
                    "of the model: leave it out, and pass checkpoints=AutoCheckpoint(..., every=...)"
                )

    @property
    def compares(self) -> bool:
        """Whether the weights of the ranks are compared."""
        return self.elastic.on_divergence is not None and self.options.parallel == "ddp"

    @property
    def is_sharded(self) -> bool:
        """Whether each worker has a part of the state."""
        return self.options.parallel == "fsdp" and self.distributed

    @property
    def snapshot_every(self) -> Any:
        return None if self.is_sharded else self.elastic.snapshot_every
