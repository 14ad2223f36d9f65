"""Decide which workers hold which shards of a sharded model, and who sends what when they change.
Pure. Both.

The shards are numbered; rank r holds number r % `count`, so that each is held by `layout(...)[0]`
ranks. A tensor's rows are divided as torch.chunk divides them: all shards have equally many rows,
except for the last ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raysgd.core.snapshot import Snapshot


@dataclass(frozen=True)
class ShardedState:
    """What the engine knows of a state that is divided among the workers: how many copies of each
    shard there should be, and two functions.

    hand_over  a replica's, called on all ranks: divide the shards among the ranks `stay`, because
               the other ones leave
    saved      the trainer's: return from which checkpoint the ranks can load the newest state, None
               if there is none. If its argument is True, it first waits for a save that is running;
               otherwise it may return what is still being saved
    """

    replicas: int
    hand_over: Callable[..., Any]
    saved: Callable[[bool], Snapshot | None] = lambda wait: None


@dataclass(frozen=True, order=True)
class ShardCopy:
    """What one worker holds after a generation has ended.

    generation  the generation that divided the model
    handed      whether the worker got this shard in a planned change, because others leave
    count       the number of shards
    index       which of them this is
    loads       how often the user has loaded a state
    applied     the optimizer steps that it contains
    ready       whether it also has the gradients of one more step, and only waits for other ranks
                to have them
    """

    generation: int
    handed: bool
    count: int
    index: int
    loads: int = 0
    applied: int = 0
    ready: bool = False


@dataclass(frozen=True)
class Agreement:
    """The state with which all ranks continue: whose shards it consists of, `holders`, by rank;
    `late` ranks make the step for which they are ready first."""

    generation: int
    handed: bool
    count: int
    holders: Mapping[int, int]
    late: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Transfer:
    """The rows from `begin` to `end` of one tensor, of this shard, go from rank `source` to rank
    `target`; equal ranks copy their own."""

    source: int
    target: int
    begin: int
    end: int


def layout(workers: int, replicas: int) -> tuple[int, int]:
    """How many copies there are of each shard, and how many shards: `replicas` copies if that
    divides the number of workers, otherwise the largest smaller number that does.

        >>> layout(4, 2), layout(3, 2), layout(2, 2), layout(6, 4)
        ((2, 2), (1, 3), (2, 1), (3, 2))
    """
    copies = max(each for each in range(1, min(workers, replicas) + 1) if workers % each == 0)
    return copies, workers // copies


def covered(shards: Iterable[tuple[int, int]]) -> bool:
    """Whether these shards, as (index, count), are all of a model's.

    >>> covered([(0, 2), (1, 2), (1, 2)]), covered([(0, 2)]), covered([])
    (True, False, False)
    """
    found = set(shards)
    return bool(found) and all(found == {(index, count) for index in range(count)} for _, count in found)


def agreed(copies: Sequence[Sequence[ShardCopy]]) -> Agreement | None:
    """Find the newest state of which the ranks hold each shard, or None."""
    everything = [(rank, each) for rank, held in enumerate(copies) for each in held]
    for generation, handed in sorted({(each.generation, each.handed) for _, each in everything}, reverse=True):
        held = [(rank, each) for rank, each in everything if (each.generation, each.handed) == (generation, handed)]
        for state in sorted({(each.loads, each.applied) for _, each in held}, reverse=True):
            late = {rank for rank, each in held if each.ready and (each.loads, each.applied + 1) == state}
            usable = [(rank, each) for rank, each in held if rank in late or (each.loads, each.applied) == state]
            if covered((each.index, each.count) for _, each in usable):
                holders = {rank: each.index for rank, each in usable}
                return Agreement(generation, handed, usable[0][1].count, holders, frozenset(late))
    return None


def rows(index: int, count: int, length: int) -> tuple[int, int]:
    """The first row of a shard, and the one after its last row.

    >>> [rows(index, 3, 7) for index in range(3)], rows(2, 3, 2)
    ([(0, 3), (3, 6), (6, 7)], (2, 2))
    """
    size = -(-length // count)
    return min(index * size, length), min((index + 1) * size, length)


def transfers(
    holders: Mapping[int, int], count: int, targets: Mapping[int, int], new_count: int, length: int
) -> list[Transfer]:
    """Choose who sends which of a tensor's `length` rows. `holders` has the shard of each rank,
    `targets` the one to hold. Copies of a shard share the work of sending it."""
    by_shard = {index: sorted(rank for rank, held in holders.items() if held == index) for index in range(count)}
    plan: list[Transfer] = []
    for number, (target, index) in enumerate(sorted(targets.items())):
        begin, end = rows(index, new_count, length)
        for shard, ranks in by_shard.items():
            first, last = rows(shard, count, length)
            first, last = max(first, begin), min(last, end)
            if first < last:
                source = target if target in ranks else ranks[number % len(ranks)]
                plan.append(Transfer(source, target, first, last))
    return plan
