"""Seats: who has which rank in a generation. Pure; how ranks meet is the backend's business."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Alone", "Seat", "assign_seats"]


@dataclass(frozen=True)
class Seat:
    """One rank's place in one generation. `solo` marks a recruit that warms up alone before it joins."""

    world_rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    generation: int = 0
    solo: bool = False


def assign_seats(nodes: Sequence[str], *, generation: int = 0) -> list[Seat]:
    """Ranks in the order given (survivors first, in their old order); local ranks count within a node.

    >>> [(s.world_rank, s.local_rank, s.node_rank) for s in assign_seats(["a", "b", "a"])]
    [(0, 0, 0), (1, 0, 1), (2, 1, 0)]
    """
    order = list(dict.fromkeys(nodes))
    seen = dict.fromkeys(order, 0)
    seats = []
    for rank, node in enumerate(nodes):
        seats.append(
            Seat(
                world_rank=rank,
                world_size=len(nodes),
                local_rank=seen[node],
                local_world_size=list(nodes).count(node),
                node_rank=order.index(node),
                generation=generation,
            )
        )
        seen[node] += 1
    return seats


class Alone:
    """The backend of a group that never has more than one worker: there is nobody to meet."""

    in_place = True
    needs_offers = False

    def offer(self) -> dict[str, Any]:
        return {}

    def plan(self, seats: Sequence[Seat], offers: Sequence[dict[str, Any]] = ()) -> list[dict[str, Any]]:
        return [{} for _ in seats]

    def join(self, seat: Seat, settings: dict[str, Any]) -> None:
        """Nobody to meet."""

    def leave(self) -> None:
        """Nobody to leave."""

    def abort(self) -> None:
        """No collective to end."""

    def collectives(self) -> int:
        return 0

    def is_interruption(self, error: BaseException) -> bool:
        return False
