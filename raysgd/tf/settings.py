"""What a replica of a TFTrainer needs from its trainer. The driver decides these values. Both."""

from __future__ import annotations

from dataclasses import dataclass

from raysgd.training.settings import ReplicaSettings

__all__ = ["TFSettings"]


@dataclass(frozen=True, kw_only=True)
class TFSettings(ReplicaSettings):
    """Adds TensorFlow's random seed in a trainer without a `seed`. It is the same on all ranks, so that they shuffle a data
    set alike."""

    shuffle_seed: int | None = None
