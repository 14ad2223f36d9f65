"""Ranks are assigned in order, and counted within nodes."""

import pytest

from raysgd.core.ranks import assign_ranks


@pytest.mark.parametrize(
    ("nodes", "local_ranks", "local_sizes", "node_ranks"),
    [
        ([], [], [], []),
        (["a", "b", "a"], [0, 0, 1], [2, 1, 2], [0, 1, 0]),
        (["b", "a", "a", "b"], [0, 0, 1, 1], [2, 2, 2, 2], [0, 1, 1, 0]),
    ],
)
def test_ranks(nodes: list[str], local_ranks: list[int], local_sizes: list[int], node_ranks: list[int]) -> None:
    rank_infos = assign_ranks(nodes, generation=7)
    assert [rank_info.world_rank for rank_info in rank_infos] == list(range(len(nodes)))
    assert [rank_info.local_rank for rank_info in rank_infos] == local_ranks
    assert [rank_info.local_world_size for rank_info in rank_infos] == local_sizes
    assert [rank_info.node_rank for rank_info in rank_infos] == node_ranks
    assert {(rank_info.world_size, rank_info.generation, rank_info.solo) for rank_info in rank_infos} <= {
        (len(nodes), 7, False)
    }
