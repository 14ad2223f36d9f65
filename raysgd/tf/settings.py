"""What a replica is told once, by the trainer. Plain values; decided on the driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["ReplicaSettings"]


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings:
    """distributed: can there be more than one worker? threads: cores of this worker, where they are not all.

    seed: TensorFlow's own, the same on all ranks, so that a data set is shuffled in the same order on all of them.
    """

    distributed: bool = False
    use_gpu: bool = False
    use_tqdm: bool = False
    num_workers: int = 1
    threads: int | None = None
    seed: int | None = None
    snapshot_every: Any = None
