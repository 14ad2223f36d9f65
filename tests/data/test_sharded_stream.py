"""A ShardedStream uses every sample once: its assignment of shards under any schedule of changes, without processes."""

import random
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from raysgd import ConfigError
from raysgd.core.ranks import RankInfo
from raysgd.core.read_ahead import ReadAhead
from raysgd.data import ShardedStream
from raysgd.data.sharded_stream import AGAIN, ShardFeed, ShardStep, ShardTeam, even_out, make_teams
from raysgd.torch.data import shards
from raysgd.torch.data.shards import ShardSource
from tests.torch.data.sources import begin, drawn
from tests.torch.small import Recording, inline

Sample = tuple[int, int]


def stream_of(lengths: list[int], *, seeks: bool = False, **options: Any) -> ShardedStream:
    def open_shard(shard: int) -> Iterator[Sample]:
        return ((shard, number) for number in range(lengths[shard]))

    def open_at(shard: int, start: int) -> Iterator[Sample]:
        return ((shard, number) for number in range(start, lengths[shard]))

    return ShardedStream(open_at if seeks else open_shard, len(lengths), **options)


class Group:
    """Ranks that make their steps in turn, in one thread."""

    def __init__(self, stream: ShardedStream, counts: list[int], ended: set[int], ranks: int, **options: Any) -> None:
        self.feeds = [ShardFeed(stream, 1, RankInfo(rank, ranks), counts, ended, **options) for rank in range(ranks)]

    def step(self) -> list[ShardStep] | None:
        while True:
            tally = [sum(column) for column in zip(*(feed.propose() for feed in self.feeds), strict=True)]
            steps = [feed.settle(tally) for feed in self.feeds]
            assert all(feed.counts == self.feeds[0].counts for feed in self.feeds), "all ranks know the same"
            assert all(feed._teams == self.feeds[0]._teams for feed in self.feeds)
            if steps[0] is None:
                assert steps == [None] * len(steps)
                return None
            if steps[0] is not AGAIN:
                return steps  # type: ignore[return-value]

    def close(self) -> None:
        for feed in self.feeds:
            feed.close()


@pytest.fixture(autouse=True)
def readers_end() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("raysgd-shard"):
            thread.join(60)
            assert not thread.is_alive()


@pytest.mark.parametrize("seed", range(20))
def test_every_sample_is_used_once_under_any_schedule(seed: int) -> None:
    choose = random.Random(seed)
    lengths = [choose.choice([0, 1, 3, 10, 25]) for _ in range(choose.randint(1, 9))]
    options = {
        "batch_size": choose.randint(1, 5),
        "shuffle": choose.choice([0, 1, 4, 30]),
        "readers": choose.randint(1, 3),
    }
    stream = stream_of(lengths, seeks=choose.random() < 0.5, seed=seed, **options)
    used = Counter[Sample]()
    counts, ended, more = [0] * len(lengths), set[int](), True
    while more:
        ranks = choose.randint(1, 5)
        group = Group(stream, counts, ended, ranks)
        for _ in range(choose.randint(1, 6)):
            found = group.step()
            if found is None:
                more = False
                break
            assert all(each.samples for each in found), "every rank has a batch in every step"
            fresh = [sample for each in found if each.fresh for sample in each.samples]
            assert {each.total for each in found} == {len(fresh)}
            assert len(fresh) <= options["batch_size"] * ranks
            used.update(fresh)
            counts, ended = list(group.feeds[0].counts), set(group.feeds[0].ended)  # now this step is committed
        if more and choose.random() < 0.5:
            group.step()  # a step that is not committed, because a rank fails in it
        group.close()
    assert used == Counter((shard, number) for shard, length in enumerate(lengths) for number in range(length))
    assert counts == lengths


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_without_waiting_for_each_other_ranks_use_every_sample_once(ranks: int) -> None:
    lengths = [5, 0, 12, 1]
    stream = stream_of(lengths, batch_size=4)
    group = Group(stream, [0] * 4, set(), ranks, pad=False)
    found = [sample for feed in group.feeds for step in feed.alone() for sample in step.samples]
    assert sorted(found) == [(shard, number) for shard, length in enumerate(lengths) for number in range(length)]
    group.close()


def test_a_source_keeps_its_iterator_when_an_older_one_is_deleted() -> None:
    """Otherwise one rank would assign the shards again in the next call, and the others would not."""
    source = ShardSource(stream_of([9, 9], batch_size=2), training=True, keep=2)
    begin(source, shared=True)
    old: Any = drawn(source)
    assert next(old).offset == 2
    new: Any = drawn(source, 2, generation=1)
    assert next(new).offset == 4
    old.close()
    assert drawn(source, 4, generation=1) is new
    assert drawn(source, 2, generation=1) is not new
    rest = list(drawn(source, 2, generation=1))
    assert rest[-1].offset == 18 and sum(each.rows or 0 for each in rest) == 16


def test_a_step_that_was_not_committed_leaves_no_place_behind() -> None:
    """Two ranks took two samples of each shard in a step that failed. One of them repeats it alone, from one shard."""
    source = ShardSource(stream_of([8, 8], batch_size=2), training=True, keep=2)
    begin(source, shared=True)
    source._later.append((4, {0: 2, 1: 2}, set()))
    alone = drawn(source, 0, generation=1)
    assert next(alone).offset == 2
    assert [list(place) for place in source.state()["places"]][-1] == [2, [2, 0], []]
    after = drawn(source, 2, generation=2)
    assert source._feed is not None and source._feed.counts == [2, 0]
    for _ in range(7):
        next(after)
    assert source._feed.counts == [8, 8]
    source.close()


def test_a_source_keeps_the_places_of_the_last_steps_only() -> None:
    source = ShardSource(stream_of([9, 3, 9], batch_size=2), training=True, keep=2)
    begin(source, shared=True)
    for each in drawn(source):
        places: list[Any] = source.state()["places"]
        assert [place[0] for place in places] == [*range(0, each.offset, 2), each.offset][-4:]
        assert all(sum(counts) == at for at, counts, _ in places)
        ended = {shard for shard, length in enumerate([9, 3, 9]) if places[-1][1][shard] == length}
        assert ended.issuperset(places[-1][2]) and places[0][2] == places[-1][2][: len(places[0][2])]
    assert places[-1] == [21, [9, 3, 9], [0, 1, 2]]


def test_the_work_of_a_step_does_not_depend_on_the_number_of_shards() -> None:
    widths = []
    for count in (30, 10_000):
        group = Group(stream_of([7] * count, batch_size=4, readers=2), [0] * count, set(), 3)
        for _ in range(5):
            assert group.step() is not None
            widths.append(len(group.feeds[0].propose()))
        group.close()
    assert widths[:5] == widths[5:] and max(widths) < 60


def test_a_source_that_a_load_replaces_stops_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "CLOSE_S", 60 * shards.CLOSE_S)  # this machine may be busy

    def loader() -> Any:
        return stream_of([40, 40], batch_size=2, collate_fn=torch.tensor)

    with inline(Recording, config={"loader": loader}) as trainer:
        trainer.train(num_steps=2)
        state = trainer.state_dict()
        first = reading()
        trainer.train(num_steps=2)
        trainer.load_state_dict(state)
        assert reading() == set(), "nothing is read before the next call"
        trainer.train(num_steps=2)
        assert reading().isdisjoint(first) and reading()
    assert reading() == set()


def test_a_reader_ends_when_it_is_stopped_and_when_nothing_refers_to_it() -> None:
    readers = [ReadAhead(iter(range(1000)), ahead=2, name="raysgd-shard-x") for _ in range(2)]
    assert [reader.next() for reader in readers] == [0, 0]
    threads = reading()
    assert len(threads) == 2
    readers.pop().stop()
    readers.clear()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def reading() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("raysgd-shard")}


def test_ended_teams_take_a_waiting_shard_or_join_a_team() -> None:
    teams = make_teams([0, 1, 2, 3, 4], 3)
    assert teams == [ShardTeam([0, 3], [0]), ShardTeam([1, 4], [1]), ShardTeam([2], [2])]
    even_out(teams, {0, 1, 3, 4})
    assert teams == [ShardTeam([0], [0]), ShardTeam([1, 4], [1]), ShardTeam([3], [2])]
    even_out(teams, {1})
    assert teams == [ShardTeam([1], [0, 1, 2])]


def samples_of(stream: ShardedStream, epoch: int, start: int = 0) -> list[Sample]:
    return [sample for block in stream.blocks(0, epoch, start) for sample in block]


@pytest.mark.parametrize("seeks", [False, True])
def test_a_shuffled_shard_continues_in_the_middle_of_a_block(seeks: bool) -> None:
    stream = stream_of([25], seeks=seeks, shuffle=10, seed=3)
    first = samples_of(stream, 1)
    assert sorted(first) == [(0, number) for number in range(25)] != first
    assert {number for _, number in first[:10]} == set(range(10)), "ten samples are shuffled at a time"
    assert samples_of(stream, 1) == first != samples_of(stream, 2)
    assert [samples_of(stream, 1, start) for start in range(26)] == [first[start:] for start in range(26)]


def test_a_source_that_seeks_is_not_read_from_its_beginning() -> None:
    starts = []

    def open_shard(shard: int, start: int) -> list[int]:
        starts.append(start)
        return list(range(start, 30))

    stream = ShardedStream(open_shard, 1, shuffle=10)
    assert len(samples_of(stream, 1, 17)) == 13 and starts == [10]


def test_an_error_names_its_shard() -> None:
    def open_shard(shard: int) -> Iterator[int]:
        yield 1
        if shard == 2:
            raise OSError("no such partition")

    feed = ShardFeed(ShardedStream(open_shard, 3, batch_size=4), 1, RankInfo(), [0, 0, 0], ())
    with pytest.raises(
        RuntimeError, match=r"shard 2 of a ShardedStream of 3 shards .* after 0 of its samples: OSError: no such part"
    ):
        feed.propose()
    feed.close()


@pytest.mark.parametrize(
    ("arguments", "text"), [(([1, 2], 2), "open_shard must be a function"), ((iter, 0), "num_shards must be")]
)
def test_wrong_arguments(arguments: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ShardedStream(*arguments)
