"""The names of `ray.air`, for code that was written for AIR. Both."""

from __future__ import annotations

from raysgd.train import session
from raysgd.train.checkpoint import Checkpoint
from raysgd.train.fit.result import Result
from raysgd.train.fit.settings import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig

__all__ = [
    "Checkpoint",
    "CheckpointConfig",
    "FailureConfig",
    "Result",
    "RunConfig",
    "ScalingConfig",
    "session",
]
