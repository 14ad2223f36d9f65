"""Ranks are assigned in order, and counted within nodes."""

import pytest

from raysgd.core.ranks import RankInfo, SingleWorkerBackend, assign_ranks


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


class Node(str):
    """A node's name that counts how often it is compared with another one."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Node.compared += 1
        return super().__eq__(other)

    __hash__ = str.__hash__


def test_the_work_grows_with_the_number_of_ranks_and_not_with_its_square() -> None:
    ranks = 4000
    rank_infos = assign_ranks([Node(f"node-{rank // 8}") for rank in range(ranks)])
    assert rank_infos[-1].node_rank == 499 and rank_infos[-1].local_world_size == 8
    assert Node.compared < 10 * ranks


def test_a_single_worker_needs_no_rendezvous() -> None:
    backend = SingleWorkerBackend()
    assert backend.in_place
    assert backend.plan(assign_ranks(["here"])) == [{}]
    backend.join(RankInfo(), {})
    backend.abort()
    backend.leave()
    assert not backend.is_interruption(RuntimeError("Connection closed by peer"))
