"""The division of a step's samples among the workers that there are. Worker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from raysgd.core.ranks import RankInfo

Part = TypeVar("Part")


def share(parts: Sequence[Part], rank_info: RankInfo) -> tuple[list[Part], float]:
    """Choose this rank's parts of a step, and the weight of their mean: with it, the mean over the
    ranks is that over all parts. A rank without one takes the first part with weight 0, because
    every rank must make the step's collective calls."""
    own = list(parts[rank_info.world_rank :: rank_info.world_size])
    return own or list(parts[:1]), len(own) * rank_info.world_size / len(parts)
