"""What a replica is told once, by the trainer. Plain values; decided on the driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from raysgd.torch.exchange import Exchange
from raysgd.torch.options import TrainingOptions

__all__ = ["ReplicaSettings"]


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings:
    """distributed: is there a process group (more than one worker at most)? threads: cores of this worker. exchange: makes
    what carries gradients where the models are not wrapped.
    `rows(name, dataset, deliver)` opens the way to the rows of a Ray Dataset that was made in a worker."""

    distributed: bool = False
    use_gpu: bool = False
    wrap_ddp: bool = True
    add_dist_sampler: bool = True
    scheduler_step_freq: str | None = None
    use_tqdm: bool = False
    precision: str = "fp32"
    use_fp16: Any = False
    num_workers: int = 1
    threads: int | None = None
    batch: Literal["per_worker", "global"] = "per_worker"
    snapshot_every: Any = None
    rows: Callable[..., Any] | None = None
    options: TrainingOptions = field(default_factory=TrainingOptions)
    exchange: Callable[[], Exchange] = Exchange
