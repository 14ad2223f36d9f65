"""What a replica of a TorchTrainer needs to know. Plain values, decided on the driver. Both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from raysgd.constants import VALID_SCHEDULER_STEP
from raysgd.errors import ConfigError
from raysgd.torch.options import TrainingOptions
from raysgd.torch.wrapping import Exchange
from raysgd.training.settings import ReplicaSettings

__all__ = ["TorchSettings"]


@dataclass(frozen=True, kw_only=True)
class TorchSettings(ReplicaSettings):
    """Adds what only torch needs.

    batch     `ElasticConfig.batch`
    rows      `rows(name, dataset, deliver)` opens the rows of a Ray Dataset that was made in a worker
    exchange  makes the object that averages gradients if the models are not wrapped
    """

    wrap_ddp: bool = True
    add_dist_sampler: bool = True
    scheduler_step_freq: str | None = None
    precision: str = "fp32"
    use_fp16: Any = False
    batch: Literal["per_worker", "global"] = "per_worker"
    rows: Callable[..., Any] | None = None
    options: TrainingOptions = field(default_factory=TrainingOptions)
    exchange: Callable[[], Exchange] = Exchange

    def __post_init__(self) -> None:
        freq = self.scheduler_step_freq
        if freq is not None and freq not in VALID_SCHEDULER_STEP:
            raise ConfigError(
                f"scheduler_step_freq must be one of {sorted(VALID_SCHEDULER_STEP)} or None, got {freq!r}"
            )
