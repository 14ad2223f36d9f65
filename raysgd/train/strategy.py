"""Which checkpoints of a run stay on disk."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

from raysgd.errors import ConfigError

__all__ = ["TIMESTAMP", "CheckpointStrategy"]

TIMESTAMP = "_timestamp"


@dataclass(frozen=True)
class CheckpointStrategy:
    """How many checkpoints are kept on disk, and which.

    num_to_keep                 None: all; 0: nothing is written; k: the best k
    checkpoint_score_attribute  what makes one better: looked up in the checkpoint, then in the metrics reported with it
    checkpoint_score_order      "max" or "min"

    By default the score is the time, so the newest are kept.
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str = TIMESTAMP
    checkpoint_score_order: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        keep = self.num_to_keep
        if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 0):
            raise ConfigError(
                f"num_to_keep must be None (all), 0 (nothing on disk) or a number of checkpoints, got {keep!r}"
            )
        if self.checkpoint_score_order not in ("max", "min"):
            raise ConfigError(f"checkpoint_score_order must be 'max' or 'min', got {self.checkpoint_score_order!r}")
        if not isinstance(self.checkpoint_score_attribute, str):
            raise ConfigError(f"checkpoint_score_attribute must be a name, got {self.checkpoint_score_attribute!r}")

    @property
    def by_time(self) -> bool:
        return self.checkpoint_score_attribute == TIMESTAMP

    def score(self, checkpoint: dict[str, Any], metrics: dict[str, Any]) -> float:
        """Larger is better, whatever the order says."""
        name = self.checkpoint_score_attribute
        found = checkpoint.get(name, metrics.get(name))
        if not isinstance(found, Real) or isinstance(found, bool):
            have = sorted({*checkpoint, *metrics})
            raise ConfigError(
                f"checkpoint_score_attribute {name!r} must be a number in every checkpoint or in the metrics reported "
                f"with it; found {found!r} (there are: {', '.join(have)})"
            )
        return float(found) if self.checkpoint_score_order == "max" else -float(found)
