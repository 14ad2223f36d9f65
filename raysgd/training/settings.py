"""What every replica needs from its trainer. The driver decides these values. Both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from raysgd.config import ElasticConfig


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings:
    """What torch and TensorFlow have in common.

    distributed     whether there can be more than one worker
    threads         how many cores a worker may use; None: all
    snapshot_every  `ElasticConfig.snapshot_every`
    seed            the trainer's `seed`
    elastic         the trainer's: `batch` and `lr` are for replicas
    measures        what the workers measure for callbacks: `MEASURES` of raysgd.callbacks.monitors
    """

    distributed: bool = False
    use_gpu: bool = False
    use_tqdm: bool = False
    num_workers: int = 1
    threads: int | None = None
    snapshot_every: Any = None
    seed: int | None = None
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    measures: frozenset[str] = frozenset()
