"""Assign ranks to the workers of a generation. Pure: a backend connects the ranks. Both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RankInfo:
    """World, local and node rank of one worker in one generation. `solo`: a replacement, set up
    alone. `local`: all ranks are on the driver's node."""

    world_rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    generation: int = 0
    solo: bool = False
    local: bool = False


def assign_ranks(nodes: Sequence[str], *, generation: int = 0, local: bool = False) -> list[RankInfo]:
    """Assign ranks in the order of the nodes that are given (survivors first, in their old order).
    Local ranks count the workers of one node.

        >>> [(r.world_rank, r.local_rank, r.node_rank) for r in assign_ranks(["a", "b", "a"])]
        [(0, 0, 0), (1, 0, 1), (2, 1, 0)]
    """
    sizes, seen = Counter(nodes), Counter[str]()
    node_ranks = {node: number for number, node in enumerate(sizes)}
    rank_infos = []
    for rank, node in enumerate(nodes):
        rank_infos.append(
            RankInfo(
                world_rank=rank,
                world_size=len(nodes),
                local_rank=seen[node],
                local_world_size=sizes[node],
                node_rank=node_ranks[node],
                generation=generation,
                local=local,
            )
        )
        seen[node] += 1
    return rank_infos
