"""A stream in shards, each of whose samples is used once, however the workers change. Worker."""

from __future__ import annotations

import inspect
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

from raysgd.config import at_least
from raysgd.core.ranks import RankInfo
from raysgd.core.read_ahead import ReadAhead
from raysgd.core.sampling_plan import RankPart, SamplingPlan
from raysgd.errors import ConfigError, described, shown, suggesting

AHEAD = 2
AGAIN = object()


class ShardedStream:
    """Samples from shards that can only be read from their beginning: files, partitions, ranges of
    offsets.

        def open_shard(shard):
            with open(paths[shard]) as file:
                yield from map(parse, file)

        self.register_data(train_loader=ShardedStream(open_shard, len(paths), batch_size=32, shuffle=1000))

    `open_shard(shard)`, for each number below `num_shards`, returns an iterable of the samples of
    one shard, the same ones in the same order each time. With a second parameter,
    `open_shard(shard, start)`, it leaves out the first `start` samples itself, for sources that can
    seek; otherwise they are read and dropped.

    Each worker reads its own shards, `readers` of them at a time, each in a thread that is a few
    batches ahead. A worker whose shards have ended takes over a shard of another one; if there is
    none, it shares one. What is committed of each shard is part of the state. When workers change,
    or a checkpoint is loaded by any number of workers, the shards are assigned again, and each
    continues after its committed samples.

    `batch_size` is that of each worker. `shuffle` is how many samples of a shard are shuffled
    together; the order depends on `seed`, the epoch and the shard, and the order of the shards on
    `seed` and the epoch. `collate_fn` makes a batch of a list of samples; by default, it is
    torch's.
    """

    @suggesting
    def __init__(
        self,
        open_shard: Callable[..., Iterable[Any]],
        num_shards: int,
        *,
        batch_size: int = 32,
        shuffle: int = 0,
        seed: int = 0,
        readers: int = 1,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        if not callable(open_shard):
            raise ConfigError(
                f"open_shard must be a function that returns the samples of a shard, got {shown(open_shard)}: pass one that "
                "takes the number of the shard"
            )
        limits = {"num_shards": (num_shards, 1), "batch_size": (batch_size, 1), "shuffle": (shuffle, 0)}
        for name, (value, least) in {**limits, "seed": (seed, 0), "readers": (readers, 1)}.items():
            at_least(name, value, least, whole=True)
        self.open_shard, self.num_shards, self.batch_size = open_shard, num_shards, batch_size
        self.shuffle, self.seed, self.readers, self.collate_fn = shuffle, seed, readers, collate_fn
        places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        self._seeks = sum(each.kind in places for each in inspect.signature(open_shard).parameters.values()) > 1

    def __len__(self) -> int:
        raise TypeError(
            "a ShardedStream has no length, and no DataLoader is needed around it: pass the stream itself, "
            "register_data(train_loader=stream)"
        )

    def __bool__(self) -> bool:
        return True

    def order(self, epoch: int) -> list[int]:
        """Draw the order in which the shards of an epoch are assigned."""
        shards = list(range(self.num_shards))
        if self.shuffle:
            random.Random(repr((self.seed, epoch))).shuffle(shards)
        return shards

    def blocks(self, shard: int, epoch: int, start: int) -> Iterator[list[Any]]:
        """Yield a shard's samples after the first `start`, in lists that are shuffled together."""
        size = self.shuffle or self.batch_size
        number, skip = divmod(start, size)
        at = number * size
        try:
            samples = iter(self.open_shard(shard, at) if self._seeks else self.open_shard(shard))
            if not self._seeks:
                deque(islice(samples, at), maxlen=0)
            while block := list(islice(samples, size)):
                at += len(block)
                if self.shuffle:
                    random.Random(repr((self.seed, epoch, shard, number))).shuffle(block)
                yield block[skip:]
                number, skip = number + 1, 0
        except Exception as error:
            raise RuntimeError(
                f"shard {shard} of a ShardedStream of {self.num_shards} shards raised an error after {at} of its samples: "
                f"{described(error)}"
            ) from error


class ShardStep(NamedTuple):
    """One rank's samples of one step.

    fresh    whether they are its own
    total    how many samples all ranks have together
    taken    how many samples all ranks have of each shard
    over     the shards that end with this step
    """

    samples: list[Any]
    fresh: bool
    total: int
    taken: Mapping[int, int] = MappingProxyType({})
    over: Set[int] = frozenset()


class ShardFeed:
    """Reads one rank's part of the rest of an epoch, in steps that all ranks make together.

    In each step, every rank passes what `propose` returns to a sum over all ranks, and `settle`
    takes the sum. So all of them know what is used of each shard, and assign shards in the same
    way. `counts` are the samples that were used of each shard, and `ended` are the shards that have
    no more.

    The sum has a slot for each team, with room for the shards of which the team used something. If
    that is too small, it grows, and all ranks propose again. So the work of a step does not depend
    on the number of shards.
    """

    def __init__(
        self,
        stream: ShardedStream,
        epoch: int,
        rank_info: RankInfo,
        counts: Sequence[int],
        ended: Iterable[int],
        *,
        pad: bool = True,
    ) -> None:
        self._stream, self._epoch, self._rank, self._pad = stream, epoch, rank_info.world_rank, pad
        self.counts, self.ended = list(counts), set(ended)
        ranks = rank_info.world_size
        self._teams = make_teams([shard for shard in stream.order(epoch) if shard not in self.ended], ranks)
        self._room = self._least_room = stream.readers + 1
        self._rows: list[tuple[int, Any]] = []  # shard, sample
        self._readers: deque[tuple[int, ReadAhead[list[Any]], list[Any]]] = deque()
        self._read_out: set[int] = set()  # shards that have ended here, and not yet on all ranks
        self._meet_team()

    def propose(self) -> list[int]:
        """Propose for each team how many shards follow, and for each of these its number, and two
        times the samples that the team takes of it, plus 1 if it has ended. Only the first rank of
        a team counts."""
        width = 1 + 2 * self._room
        message = [0] * (width * len(self._teams))
        if self._team is not None:
            self._fill(self._team)
            if self._rank == self._team.ranks[0]:
                taken = Counter(row[0] for row in self._rows)
                shards = self._read_out.union(taken)
                said = [part for each in shards for part in (each, 2 * taken[each] + (each in self._read_out))]
                at = self._place * width
                message[at] = len(shards)
                if len(shards) <= self._room:
                    message[at + 1 : at + 1 + len(said)] = said
        return message

    def settle(self, message: Sequence[int]) -> ShardStep | object | None:
        """Find this rank's samples, or None at the end. Return AGAIN if shards were assigned again,
        because some ranks have none left, or if a team needs more room. Then no sample is used, and
        all ranks propose again."""
        width = 1 + 2 * self._room
        slots = [message[at : at + width] for at in range(0, len(message), width)]
        most = max((slot[0] for slot in slots), default=0)
        if most > self._room:
            self._room = most
            return AGAIN
        self._room = max(self._least_room, min(self._room, 2 * most))
        said = [list(zip(slot[1::2], slot[2::2], strict=True))[: slot[0]] for slot in slots]
        totals = [sum(value // 2 for _, value in each) for each in said]
        if not any(totals):
            return None
        taken = {shard: value // 2 for each in said for shard, value in each if value > 1}
        over = {shard for each in said for shard, value in each if value % 2}
        if not all(totals):
            gone = self.ended | over.difference(taken)
            even_out(self._teams, {shard for team in self._teams for shard in team.shards if shard not in gone})
            self._meet_team()
            return AGAIN
        return self._used(totals, taken, over)

    def alone(self) -> Iterator[ShardStep]:
        """Yield this rank's steps of a pass in which no rank waits for another one."""
        while self._team is not None:
            self._fill(self._team)
            if not self._rows:
                return
            part = self._part(self._team)
            samples = [sample for _, sample in self._rows[part.start : part.stop]]
            self._rows = []
            if samples:
                yield ShardStep(samples, part.fresh, len(samples))

    def close(self, wait_s: float = 0.0) -> None:
        """End the threads. Wait at most so long for those that are reading."""
        readers, until = list(self._readers), time.monotonic() + wait_s
        self._keep(set())
        for _, reader, _ in readers:
            reader.join(max(until - time.monotonic(), 0.0))

    def _used(self, totals: Sequence[int], taken: Mapping[int, int], over: set[int]) -> ShardStep:
        """Note that these samples were used, and return this rank's part of them."""
        assert self._team is not None
        part = self._part(self._team)
        samples, self._rows = [sample for _, sample in self._rows[part.start : part.stop]], []
        for shard, count in taken.items():
            self.counts[shard] += count
        self.ended |= over
        self._read_out -= over
        return ShardStep(samples, part.fresh, sum(totals), taken, over)

    def _part(self, team: ShardTeam) -> RankPart:
        ranks = len(team.ranks)
        plan = SamplingPlan(len(self._rows), self._full(team), parts=ranks, world_size=ranks, pad=self._pad)
        return next(iter(plan.of_rank(team.ranks.index(self._rank), 0)), RankPart(0, 0))

    def _full(self, team: ShardTeam) -> int:
        return self._stream.batch_size * len(team.ranks)

    def _fill(self, team: ShardTeam) -> None:
        """Read the team's samples of the next step, in turn from each shard that is open."""
        size = self._full(team)
        while len(self._rows) < size:
            while self._waiting and len(self._readers) < self._stream.readers:
                self._open(self._waiting.popleft())
            if not self._readers:
                return
            shard, reader, block = self._readers[0]  # it stays there if it raises an error, so that `close` finds it
            if not block:
                block = (reader.next() or [])[::-1]  # the samples are taken from its end
            self._readers.popleft()
            if block:
                self._rows.append((shard, block.pop()))
                self._readers.append((shard, reader, block))
            else:
                self._read_out.add(shard)

    def _open(self, shard: int) -> None:
        blocks = self._stream.blocks(shard, self._epoch, self.counts[shard])
        self._readers.append((shard, ReadAhead(blocks, ahead=AHEAD, name=f"raysgd-shard-{shard}"), []))

    def _meet_team(self) -> None:
        """Find this rank's team after an assignment, and keep what was read of its shards."""
        self._place = next((place for place, team in enumerate(self._teams) if self._rank in team.ranks), -1)
        self._team = self._teams[self._place] if self._teams else None
        shards = self._team.shards if self._team is not None else []
        self._keep(set(shards))
        known = {shard for shard, _, _ in self._readers} | self._read_out
        self._waiting = deque(shard for shard in shards if shard not in known)

    def _keep(self, shards: set[int]) -> None:
        """Forget what was read of other shards."""
        for shard, reader, _ in self._readers:
            if shard not in shards:
                reader.stop()
        self._readers = deque(each for each in self._readers if each[0] in shards)
        self._read_out &= shards
        self._rows = [row for row in self._rows if row[0] in shards]


# -- which ranks read which shards ----------------------------------------------------------------------


@dataclass
class ShardTeam:
    """Ranks that divide these shards: one rank has several, or several ranks share one."""

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
    """Remove the shards that are not `left`. Give each team without one a shard of another, or let
    its ranks join one. Others stay: a new reader must skip what was used of a shard."""
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
