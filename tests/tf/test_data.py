"""Each row is used once per epoch, on any number of ranks, and from any position in the epoch."""

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from raysgd.core.ranks import RankInfo  # noqa: E402
from raysgd.errors import ConfigError  # noqa: E402
from raysgd.replica.steps.position import Position  # noqa: E402
from raysgd.replica.steps.step import Drawn  # noqa: E402
from raysgd.tf.channel import Channel  # noqa: E402
from raysgd.tf.data import OwnSource, SharedSource, make_source  # noqa: E402


def numbers(count: int = 23, size: int = 5, seed: int | None = None) -> Any:
    data = tf.data.Dataset.range(count)
    return (data if seed is None else data.shuffle(count, seed=seed)).batch(size)


def rank_infos(world: int) -> list[RankInfo]:
    return [RankInfo(world_rank=rank, world_size=world) for rank in range(world)]


def shared(data: Any, *, epoch: int = 1, pad: bool = True) -> SharedSource:
    return SharedSource(data, Position(epoch=epoch), pad=pad)


def rows(drawn: Drawn) -> list[int]:
    return [int(row) for row in drawn.batch] if drawn.fresh else []


@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_each_row_is_used_once_and_fractions_add_up(world: int) -> None:
    ranks = [list(shared(numbers()).batches(rank_info, 0)) for rank_info in rank_infos(world)]
    assert {len(rank) for rank in ranks} == {5}
    for step in zip(*ranks, strict=True):
        assert sum(drawn.weight for drawn in step) == pytest.approx(len(step))
        assert all(len(drawn.batch) for drawn in step), "every rank has something to compute"
    assert sorted(row for rank in ranks for drawn in rank for row in rows(drawn)) == list(range(23))


def test_no_rank_repeats_rows_in_a_validation() -> None:
    ranks = [list(shared(numbers(), pad=False).batches(rank_info, 0)) for rank_info in rank_infos(7)]
    assert sorted(row for rank in ranks for drawn in rank for row in rows(drawn)) == list(range(23))
    assert all(drawn.fresh for rank in ranks for drawn in rank)


def test_another_number_of_ranks_continues_a_shuffled_epoch() -> None:
    def fresh(epoch: int) -> SharedSource:
        tf.random.set_seed(1)
        return shared(numbers(seed=4), epoch=epoch)

    whole = [rows(drawn) for drawn in fresh(3).batches(rank_infos(1)[0], 0)]
    rest = [list(fresh(3).batches(rank_info, 2)) for rank_info in rank_infos(2)]
    assert [rows(one) + rows(other) for one, other in zip(*rest, strict=True)] == whole[2:]
    assert whole != [rows(drawn) for drawn in fresh(1).batches(rank_infos(1)[0], 0)], "epochs differ"


def test_a_call_continues_where_the_last_one_ended() -> None:
    source, rank_info = shared(numbers(seed=4)), rank_infos(1)[0]
    first = source.batches(rank_info, 0)
    seen = rows(next(first)) + rows(next(first))
    undone = rows(next(first))
    again = source.batches(rank_info, 2)
    assert rows(next(again)) == undone, "it was drawn, but never committed, so it comes again"
    seen += undone + [row for drawn in again for row in rows(drawn)]
    assert sorted(seen) == list(range(23))


def test_any_iterable_of_batches_is_accepted() -> None:
    batches = [np.arange(4), np.arange(4, 7)]
    ranks = [list(shared(batches).batches(rank_info, 0)) for rank_info in rank_infos(2)]
    assert [rows(drawn) for drawn in ranks[0]] == [[0, 1], [4, 5]]
    assert [rows(drawn) for drawn in ranks[1]] == [[2, 3], [6]]


class Ensemble(Channel):
    """Adds the numbers of the other ranks."""

    def __init__(self, others: list[int]) -> None:
        super().__init__(1)
        self._others = iter(others)

    def sum(self, tensors: Any) -> list[Any]:
        return [tensors[0] + next(self._others)]


def test_a_rank_with_less_data_repeats_it_with_weight_0() -> None:
    source = OwnSource(numbers(5), numbers(5), Position(epoch=1), Ensemble([5, 3, 0]), together=True)
    drawn = list(source.batches(rank_infos(2)[0], 0))
    assert [(len(each.batch), each.weight, each.fresh) for each in drawn] == [(5, 1.0, True), (5, 0.0, False)]
    assert drawn[0].rows == 10 and drawn[1].rows == 3


def test_a_call_on_a_ranks_own_data_continues_where_the_last_one_ended() -> None:
    source, rank_info = (
        OwnSource(numbers(), numbers(seed=4), Position(epoch=1), Channel(1), together=False),
        rank_infos(1)[0],
    )
    seen = []
    for offset in range(0, 5, 2):
        drawn = source.batches(rank_info, offset)
        seen += [row for each in islice(drawn, 2) for row in rows(each)]
    assert sorted(seen) == list(range(23))


def test_a_rank_that_has_read_a_batch_of_its_own_data_agrees_on_it_again() -> None:
    source, rank_info = (
        OwnSource(numbers(), numbers(seed=4), Position(epoch=1), Ensemble([5, 3, 2, 5, 5, 5, 0]), together=True),
        rank_infos(2)[0],
    )
    drawn = source.batches(rank_info, 0)
    first, undone = next(drawn), next(drawn)
    again = list(source.batches(rank_info, 1))
    assert (undone.rows, again[0].rows, rows(again[0])) == (8, 7, rows(undone))
    assert sorted(row for each in (first, *again) for row in rows(each)) == list(range(23))


class Flaky:
    """Fails once, in the third batch."""

    def __init__(self) -> None:
        self.failed = False

    def __getitem__(self, index: int) -> Any:
        if index == 2 and not self.failed:
            self.failed = True
            raise OSError("planned")
        if index == 5:
            raise IndexError
        return np.arange(4) + 4 * index


def test_an_error_of_the_data_ends_no_epoch() -> None:
    source, rank_info = shared(Flaky()), rank_infos(1)[0]
    drawn = source.batches(rank_info, 0)
    seen = rows(next(drawn)) + rows(next(drawn))
    with pytest.raises(OSError, match="planned"):
        next(drawn)
    seen += [row for each in source.batches(rank_info, 2) for row in rows(each)]
    assert seen == list(range(20))


def of_files(folder: Path, size: int) -> Any:
    """Return batches of the lines of four files, sharded by file."""
    names = [folder / f"{number}.txt" for number in range(4)]
    for number, name in enumerate(names):
        name.write_text("".join(f"{number}{row}\n" for row in range(3)))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE
    return tf.data.TextLineDataset(list(map(str, names))).batch(size).with_options(options)


def test_with_sharding_by_file_each_rank_reads_its_own_files(tmp_path: Path) -> None:
    data, ranks = of_files(tmp_path, 4), []
    for rank_info in rank_infos(2):
        source = make_source(data, Position(), rank_info, Ensemble([]), training=False)
        assert isinstance(source, OwnSource)
        ranks.append([row.decode() for batch in source.data for row in batch.numpy()])
    assert {row[0] for row in ranks[0]}.isdisjoint({row[0] for row in ranks[1]})
    assert len(ranks[0]) == len(ranks[1]) == 6


def test_with_sharding_by_file_the_ranks_batches_add_up_to_the_batch_of_all(tmp_path: Path) -> None:
    data, sizes = of_files(tmp_path, 6), []
    for rank_info, others in zip(rank_infos(4), ([4, 3, 0], [4, 3, 0], [5, 4, 2, 0], [5, 4, 2, 0]), strict=True):
        source = make_source(data, Position(), rank_info, Ensemble(others), training=True)
        drawn = list(source.batches(rank_info, 0))
        sizes.append([len(each.batch) for each in drawn if each.fresh])
        assert (drawn[0].rows, drawn[0].weight) == (6, sizes[-1][0] * 4 / 6)
    assert sizes == [[2, 1], [2, 1], [1, 1, 1], [1, 1, 1]]


def test_sharding_policies() -> None:
    def source(name: str) -> Any:
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy[name]
        return make_source(numbers().with_options(options), Position(), rank_infos(2)[1], Ensemble([]), training=True)

    assert isinstance(source("AUTO"), SharedSource) and isinstance(source("DATA"), SharedSource)
    assert isinstance(source("OFF"), OwnSource)
    with pytest.raises(ConfigError, match="HINT"):
        source("HINT")
