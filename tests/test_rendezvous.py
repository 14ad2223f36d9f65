"""Who has which rank."""

import pytest

from raysgd.rendezvous import Alone, Seat, assign_seats


@pytest.mark.parametrize(
    ("nodes", "local_ranks", "local_sizes", "node_ranks"),
    [
        ([], [], [], []),
        (["a"], [0], [1], [0]),
        (["a", "a", "a"], [0, 1, 2], [3, 3, 3], [0, 0, 0]),
        (["a", "b", "a"], [0, 0, 1], [2, 1, 2], [0, 1, 0]),
        (["b", "a", "a", "b"], [0, 0, 1, 1], [2, 2, 2, 2], [0, 1, 1, 0]),
    ],
)
def test_seats(nodes: list[str], local_ranks: list[int], local_sizes: list[int], node_ranks: list[int]) -> None:
    seats = assign_seats(nodes, generation=7)
    assert [seat.world_rank for seat in seats] == list(range(len(nodes)))
    assert [seat.local_rank for seat in seats] == local_ranks
    assert [seat.local_world_size for seat in seats] == local_sizes
    assert [seat.node_rank for seat in seats] == node_ranks
    assert {(seat.world_size, seat.generation, seat.solo) for seat in seats} <= {(len(nodes), 7, False)}


def test_a_group_of_one_meets_nobody() -> None:
    backend = Alone()
    assert backend.in_place
    assert backend.plan(assign_seats(["here"])) == [{}]
    backend.join(Seat(), {})
    backend.abort()
    backend.leave()
    assert not backend.is_interruption(RuntimeError("Connection closed by peer"))
