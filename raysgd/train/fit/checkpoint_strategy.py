"""Which checkpoints of a run stay on disk."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

from raysgd.errors import ConfigError
from raysgd.train.hints import hints

__all__ = ["TIMESTAMP", "CheckpointConfig", "CheckpointStrategy", "check_strategy"]

TIMESTAMP = "_timestamp"


REPORTED = "there is one whenever the training function reports or saves one"


@hints(checkpoint_frequency=REPORTED, checkpoint_at_end=REPORTED)
@dataclass(frozen=True)
class CheckpointConfig:
    """How many checkpoints of a run stay in its storage, and which.

    num_to_keep                 None: all; 0: nothing is written, the newest stays in memory; k: the best k
    checkpoint_score_attribute  what makes one better: looked up in the checkpoint, then in the metrics reported with it.
                                None: the time, so the newest are kept
    checkpoint_score_order      "max" or "min": which end of the attribute is better
    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        keep = self.num_to_keep
        if keep is not None and (not isinstance(keep, int) or isinstance(keep, bool) or keep < 0):
            raise ConfigError(
                f"num_to_keep must be None (all), 0 (nothing on disk) or a number of checkpoints, got {keep!r}"
            )
        if self.checkpoint_score_order not in ("max", "min"):
            raise ConfigError(f"checkpoint_score_order must be 'max' or 'min', got {self.checkpoint_score_order!r}")
        name = self.checkpoint_score_attribute
        if name is not None and (not isinstance(name, str) or not name):
            raise ConfigError(
                "checkpoint_score_attribute must be the name of a number in the checkpoint or the metrics, or None (the "
                f"newest are kept), got {name!r}"
            )

    @property
    def by_time(self) -> bool:
        return self.checkpoint_score_attribute in (None, TIMESTAMP)

    def score(self, checkpoint: dict[str, Any], metrics: dict[str, Any]) -> float:
        """Larger is better, whatever the order says; what is not a number (NaN) is worse than all that are."""
        name = self.checkpoint_score_attribute
        assert name is not None, "by time, nothing is looked up"
        found = checkpoint.get(name, metrics.get(name))
        if not isinstance(found, Real) or isinstance(found, bool):
            have = sorted({*checkpoint, *metrics})
            raise ConfigError(
                f"checkpoint_score_attribute {name!r} must be a number in every checkpoint or in the metrics reported "
                f"with it; found {found!r} (there are: {', '.join(have)})"
            )
        score = float(found) if self.checkpoint_score_order == "max" else -float(found)
        return -math.inf if math.isnan(score) else score


@hints(checkpoint_frequency=REPORTED, checkpoint_at_end=REPORTED)
@dataclass(frozen=True)
class CheckpointStrategy(CheckpointConfig):
    """A `CheckpointConfig` as `Trainer.run(checkpoint_strategy=...)` has always called it; each is taken for the other."""

    checkpoint_score_attribute: str | None = TIMESTAMP


def check_strategy(given: Any) -> None:
    if given is not None and not isinstance(given, CheckpointConfig):
        raise ConfigError(f"checkpoint_strategy must be a CheckpointStrategy or CheckpointConfig, got {given!r}")
