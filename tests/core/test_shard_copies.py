"""Which workers hold which shards, which state all ranks agree on, and who sends what: all sets of survivors, without processes."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations

import pytest

from raysgd.core.shard_copies import ShardCopy, agreed, covered, layout, rows, transfers


def subsets(workers: int) -> Iterator[tuple[int, ...]]:
    return chain.from_iterable(combinations(range(workers), count) for count in range(1, workers + 1))


def held_by(rank: int, count: int, *, generation: int = 1, applied: int = 7, ready: bool = False) -> ShardCopy:
    return ShardCopy(generation, False, count, rank % count, applied=applied, ready=ready)


GROUPS = [(workers, replicas) for workers in range(1, 9) for replicas in range(1, workers + 1)]


def test_each_shard_is_on_as_many_workers() -> None:
    for workers, replicas in GROUPS:
        copies, count = layout(workers, replicas)
        assert copies * count == workers and copies <= replicas
        assert copies == replicas or workers % replicas
        assert all(sum(rank % count == index for rank in range(workers)) == copies for index in range(count))


@pytest.mark.parametrize("workers", range(1, 9))
def test_every_set_of_survivors_exchanges_exactly_the_rows_that_it_lacks(workers: int) -> None:
    for replicas in range(1, workers + 1):
        count = layout(workers, replicas)[1]
        for survivors in subsets(workers):
            found = agreed([[held_by(old, count)] for old in survivors])
            if {old % count for old in survivors} != set(range(count)):
                assert found is None
                continue
            assert found is not None and not found.late
            assert found.holders == {rank: old % count for rank, old in enumerate(survivors)}
            for joining in (0, 2):
                after = len(survivors) + joining
                new_count = layout(after, replicas)[1]
                for length in (1, 2, 7, 24):
                    check_rows(
                        found.holders, count, {rank: rank % new_count for rank in range(after)}, new_count, length
                    )


def check_rows(holders: dict[int, int], count: int, targets: dict[int, int], new_count: int, length: int) -> None:
    """Check that each rank gets each of its rows once, from a rank that has it, and nothing that it has itself."""
    plan = transfers(holders, count, targets, new_count, length)
    for target, index in targets.items():
        got = [row for each in plan if each.target == target for row in range(each.begin, each.end)]
        assert got == list(range(*rows(index, new_count, length)))
    for each in plan:
        first, last = rows(holders[each.source], count, length)
        assert first <= each.begin < each.end <= last
        if each.source != each.target and each.target in holders:
            own = rows(holders[each.target], count, length)
            assert each.end <= own[0] or each.begin >= own[1]


def test_the_copies_of_a_shard_share_the_work() -> None:
    plan = transfers({0: 0, 1: 1, 2: 0, 3: 1}, 2, {4: 0, 5: 1, 6: 2, 7: 3}, 4, 16)
    assert [(each.source, each.target) for each in plan] == [(0, 4), (2, 5), (1, 6), (3, 7)]


@pytest.mark.parametrize(("workers", "replicas"), [(2, 1), (4, 2), (6, 3), (6, 2), (3, 1)])
def test_ranks_that_wait_for_others_make_the_step_that_one_has_made(workers: int, replicas: int) -> None:
    """Some ranks have made a step for which all have the gradients; then any set of them is lost."""
    count = layout(workers, replicas)[1]
    for ahead in chain([()], subsets(workers)):
        copies = [
            held_by(rank, count, applied=8) if rank in ahead else held_by(rank, count, ready=True)
            for rank in range(workers)
        ]
        for survivors in subsets(workers):
            found = agreed([[copies[old]] for old in survivors])
            if {old % count for old in survivors} != set(range(count)):
                assert found is None
                continue
            assert found is not None and len(found.holders) == len(survivors)
            some = any(old in ahead for old in survivors)
            assert found.late == ({rank for rank, old in enumerate(survivors) if old not in ahead} if some else set())


def test_ranks_without_the_gradients_do_not_make_the_step() -> None:
    copies = [held_by(0, 2, applied=8), held_by(1, 2), held_by(2, 2)]
    found = agreed([[each] for each in copies])
    assert found is not None and found.holders == {1: 1, 2: 0} and not found.late
    assert agreed([[copies[0]], [copies[1]]]) is None


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_a_change_that_was_not_completed_does_not_count(workers: int) -> None:
    """Four workers with two copies change to fewer, and a failure ends the change when only some ranks have their new shards."""
    for done in chain([()], subsets(workers)):
        new_count = layout(workers, 2)[1]
        copies = [
            [held_by(rank, 2), *([held_by(rank, new_count, generation=2)] if rank in done else [])]
            for rank in range(workers)
        ]
        found = agreed(copies)
        assert found is not None
        complete = {rank % new_count for rank in done} == set(range(new_count))
        assert (found.generation, found.count) == ((2, new_count) if complete else (1, 2))


def test_what_leaving_workers_handed_over_counts_before_what_was_there() -> None:
    handed = [replace(held_by(rank, 2), handed=True) for rank in range(2)]
    found = agreed([[held_by(rank, 3), handed[rank]] for rank in range(2)] + [[]])
    assert found is not None and (found.handed, found.count, dict(found.holders)) == (True, 2, {0: 0, 1: 1})
    assert agreed([[held_by(0, 3), handed[0]], []]) is None


def test_covered() -> None:
    assert covered([(0, 1)]) and not covered([(0, 2), (1, 3)])
