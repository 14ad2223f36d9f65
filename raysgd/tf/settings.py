"""What a replica of a TFTrainer needs from its trainer. The driver decides these values. Both."""

from __future__ import annotations

from dataclasses import dataclass

from raysgd.training.settings import ReplicaSettings


@dataclass(frozen=True, kw_only=True)
class TFSettings(ReplicaSettings):
    """Adds what only TensorFlow needs.

    shuffle_seed  the random seed in a trainer without a `seed`. It is the same on all ranks, so
                  that they shuffle a data set alike
    in_pieces     whether a worker processes a larger part of a batch, because there are fewer
                  workers, in several pieces
    """

    shuffle_seed: int | None = None
    in_pieces: bool = False
