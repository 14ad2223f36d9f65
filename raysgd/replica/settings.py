"""What every replica needs from its trainer, and what makes it there. The driver decides this.
Both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raysgd.config import ElasticConfig
from raysgd.core.control import Control
from raysgd.core.ranks import RankInfo
from raysgd.errors import ConfigError
from raysgd.replica.seeding import LARGEST_SEED


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings:
    """What torch and TensorFlow have in common.

    num_workers  how many workers there can be
    alone        whether this operator works without them, in the driver's process
    threads      how many cores a worker may use; None: all
    seed         the trainer's `seed`
    elastic      the trainer's
    wanted       metrics that are looked for after the first batch, and which argument of the
                 trainer names each
    """

    use_gpu: bool = False
    use_tqdm: bool = False
    num_workers: int = 1
    alone: bool = False
    threads: int | None = None
    seed: int | None = None
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    wanted: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        seed = self.seed
        if seed is not None and not (type(seed) is int and 0 <= seed <= LARGEST_SEED):
            raise ConfigError(
                f"seed must be a whole number from 0 to {LARGEST_SEED}, or None for no seed, got {seed!r}"
            )

    @property
    def distributed(self) -> bool:
        """Whether there can be others to work with."""
        return self.num_workers > 1 and not self.alone

    @property
    def is_exact(self) -> bool:
        """Return whether a gradient weighs by samples, or by the count that `backward` got."""
        return False

    @property
    def snapshot_every(self) -> Any:
        return self.elastic.snapshot_every


class OperatorReplicaFactory:
    """Makes a replica of this class in a worker. It is pickled, and it is the only part of a
    trainer that is sent there."""

    def __init__(self, replica_cls: Any, operator_cls: Any, config: dict[str, Any], settings: Any) -> None:
        self.replica_cls, self.operator_cls, self.config, self.settings = replica_cls, operator_cls, config, settings

    def __repr__(self) -> str:
        return f"the operator {self.operator_cls.__name__} with its config"

    def __call__(self, rank_info: RankInfo, control: Control) -> Any:
        """Worker: make the operator, whose `setup` runs now, and its replica."""
        self.replica_cls.prepare_process(self.settings)
        operator = self.operator_cls(self.config, settings=self.settings, rank_info=rank_info)
        return self.replica_cls(operator, self.settings, rank_info, control)
