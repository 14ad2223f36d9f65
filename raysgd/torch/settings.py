"""What a replica of a TorchTrainer needs from its trainer, which decides it. Both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from raysgd.callbacks.torch_profiler import ProfilerSettings
from raysgd.config import one_of
from raysgd.torch.options import TrainingOptions
from raysgd.torch.wrapping import Exchange
from raysgd.training.settings import ReplicaSettings


@dataclass(frozen=True, kw_only=True)
class TorchSettings(ReplicaSettings):
    """Adds what only torch needs.

    options    those of the trainer, resolved
    wrap_ddp   whether `register` wraps models in DistributedDataParallel
    rows       `rows(name, dataset, deliver)` opens the rows of a Ray Dataset that a worker has made
    exchange   makes the object that averages gradients if the models are not wrapped asynchronous
               whether collective calls return before the device has made them, as NCCL's do
    ema_decay  the decay of the callback EMA; None: the weights are not averaged
    profiler   what TorchProfilerCallback wants to be recorded; None: nothing
    """

    options: TrainingOptions = field(default_factory=TrainingOptions)
    wrap_ddp: bool = True
    add_dist_sampler: bool = True
    scheduler_step_freq: str | None = None
    rows: Callable[..., Any] | None = None
    exchange: Callable[[], Exchange] = Exchange
    asynchronous: bool = False
    ema_decay: float | None = None
    profiler: ProfilerSettings | None = None

    def __post_init__(self) -> None:
        one_of("scheduler_step_freq", self.scheduler_step_freq, "batch", "step", "epoch", "manual", None)
