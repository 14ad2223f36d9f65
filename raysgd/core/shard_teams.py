"""Assign the shards of a stream to ranks, also when some shards have ended. Pure. Both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class ShardTeam:
    """Ranks that divide the samples of these shards. Either one rank has several shards, or several
    ranks share one."""

    shards: list[int]
    ranks: list[int]


def make_teams(shards: Sequence[int], world_size: int) -> list[ShardTeam]:
    """Deal the shards to the ranks. If there are fewer shards than ranks, several ranks share one.

    >>> make_teams([4, 1, 7], 2)
    [ShardTeam(shards=[4, 7], ranks=[0]), ShardTeam(shards=[1], ranks=[1])]
    >>> make_teams([4], 2)
    [ShardTeam(shards=[4], ranks=[0, 1])]
    """
    count = min(len(shards), world_size)
    return [ShardTeam(list(shards[i::count]), list(range(i, world_size, count))) for i in range(count)]


def even_out(teams: list[ShardTeam], left: set[int]) -> None:
    """Remove the shards that are not `left`. Give each team without a shard one of another team, or
    let its ranks join one. Other shards stay where they are, because a new reader must skip what
    was used of a shard."""
    for team in teams:
        team.shards = [shard for shard in team.shards if shard in left]
    for team in [each for each in teams if not each.shards]:
        most = max(teams, key=lambda each: len(each.shards))
        if len(most.shards) > 1:
            team.shards.append(most.shards.pop())  # the last one, which is not begun if others wait with it
        elif most.shards:
            teams.remove(team)
            smallest = min((each for each in teams if each.shards), key=lambda each: len(each.ranks))
            smallest.ranks = sorted(smallest.ranks + team.ranks)
