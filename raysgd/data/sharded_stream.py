"""A stream in numbered shards, of which every sample is used exactly once, however the workers change. Worker."""

from __future__ import annotations

import inspect
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from raysgd.config import at_least
from raysgd.core.ranks import RankInfo
from raysgd.core.read_ahead import ReadAhead
from raysgd.core.sampling_plan import SamplingPlan
from raysgd.core.shard_teams import ShardTeam, even_out, make_teams
from raysgd.errors import ConfigError, described, shown, suggesting

__all__ = ["AGAIN", "ShardFeed", "ShardStep", "ShardedStream"]

AHEAD = 2
AGAIN = object()


class ShardedStream:
    """Samples from shards that can only be read from their beginning: files, partitions, ranges of offsets.

        def open_shard(shard):
            with open(paths[shard]) as file:
                yield from map(parse, file)

        self.register_data(train_loader=ShardedStream(open_shard, len(paths), batch_size=32, shuffle=1000))

    `open_shard(shard)` returns an iterable of the samples of one shard, the same ones in the same order each time. With a second
    parameter, `open_shard(shard, start)`, it leaves out the first `start` samples itself, for sources that can seek;
    otherwise they are read and dropped.

    Each worker reads its own shards, `readers` of them at a time, each in a thread that is a few batches ahead. A worker
    whose shards have ended takes over a shard of another one; if there is none, it shares one. What is committed of each
    shard is part of the state. When workers change, or a checkpoint is loaded by any number of workers, the
    shards are assigned again, and each continues after its committed samples.

    `batch_size` is that of each worker. `shuffle` is how many samples of a shard are shuffled together; the order depends
    on `seed`, the epoch and the shard, and the order of the shards on `seed` and the epoch. `collate_fn` makes a batch of a
    list of samples; by default, it is torch's.
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
        """Return the order in which the shards of an epoch are assigned."""
        shards = list(range(self.num_shards))
        if self.shuffle:
            random.Random(repr((self.seed, epoch))).shuffle(shards)
        return shards

    def blocks(self, shard: int, epoch: int, start: int) -> Iterator[list[Any]]:
        """Yield the samples of a shard in an epoch without the first `start`, in lists that are shuffled together."""
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
    """One rank's samples of one step, whether they are its own, and how many all ranks have together."""

    samples: list[Any]
    fresh: bool
    total: int


class ShardFeed:
    """Reads one rank's part of the rest of an epoch, in steps that all ranks make together.

    In each step, every rank passes what `propose` returns to a sum over all ranks, and `settle` takes the sum. So all of
    them know what is used of each shard, and assign shards in the same way. `counts` are the samples that were used of each
    shard, and `ended` are the shards that have no more.
    """

    def __init__(
        self,
        stream: ShardedStream,
        epoch: int,
        rank_info: RankInfo,
        counts: Sequence[int],
        ended: Iterable[int],
        *,
        step: int | None = None,
        pad: bool = True,
    ) -> None:
        self._stream, self._epoch, self._rank, self._pad = stream, epoch, rank_info.world_rank, pad
        self.counts, self.ended = list(counts), set(ended)
        ranks = rank_info.world_size
        base, more = divmod(max(step or stream.batch_size * ranks, ranks), ranks)
        self._sizes = [base + (rank < more) for rank in range(ranks)]
        self._teams = make_teams([shard for shard in stream.order(epoch) if shard not in self.ended], ranks)
        self._rows: list[tuple[int, Any]] = []
        self._readers: deque[tuple[int, ReadAhead[list[Any]], list[Any]]] = deque()
        self._read_out: set[int] = set()

    def propose(self) -> list[int]:
        """Return how many samples this rank's team takes of each shard, and then which of its shards have ended. Only the first
        rank of a team counts."""
        team, known = self._team, self._stream.num_shards
        tally = [0] * (2 * known)
        if team is not None:
            self._fill(team)
            if self._rank == team.ranks[0]:
                for shard, _ in self._rows:
                    tally[shard] += 1
                for shard in self._read_out.intersection(team.shards):
                    tally[known + shard] = 1
        return tally

    def settle(self, tally: Sequence[int]) -> ShardStep | object | None:
        """Return this rank's samples, or None at the end. Return AGAIN if shards were assigned again, because some ranks have
        none left. Then no sample is used, and all ranks propose again."""
        taken, over = tally[: self._stream.num_shards], tally[self._stream.num_shards :]
        if not any(taken):
            return None
        if not all(any(taken[shard] for shard in team.shards) for team in self._teams):
            known = [shard for team in self._teams for shard in team.shards]
            even_out(self._teams, {shard for shard in known if taken[shard] or not over[shard]})
            self._keep(set(self._team.shards) if self._team is not None else set())
            return AGAIN
        self.counts = [count + more for count, more in zip(self.counts, taken, strict=True)]
        self.ended = self.ended | {shard for shard, ends in enumerate(over) if ends}  # a new one, like `counts`
        step = self._part()
        self._rows = []
        return ShardStep(*step, sum(taken))

    def alone(self) -> Iterator[ShardStep]:
        """Yield this rank's steps of a pass in which no rank waits for another one."""
        while (team := self._team) is not None:
            self._fill(team)
            if not self._rows:
                return
            samples, fresh = self._part()
            self._rows = []
            if samples:
                yield ShardStep(samples, fresh, len(samples))

    def close(self) -> None:
        self._keep(set())

    @property
    def _team(self) -> ShardTeam | None:
        return next((team for team in self._teams if self._rank in team.ranks), None)

    def _part(self) -> tuple[list[Any], bool]:
        """Return this rank's part of its team's samples."""
        team = self._team
        assert team is not None
        plan = SamplingPlan(len(self._rows), self._full(team), len(team.ranks), pad=self._pad)
        part = plan.parts(0)[team.ranks.index(self._rank)]
        return [sample for _, sample in self._rows[part.start : part.stop]], part.fresh

    def _full(self, team: ShardTeam) -> int:
        return sum(self._sizes[rank] for rank in team.ranks)

    def _fill(self, team: ShardTeam) -> None:
        """Read the team's samples of the next step, in turn from each shard that is open."""
        opened = {shard for shard, _, _ in self._readers} | self._read_out
        waiting = deque(shard for shard in team.shards if shard not in opened)
        while len(self._rows) < self._full(team):
            while waiting and len(self._readers) < self._stream.readers:
                self._open(waiting.popleft())
            if not self._readers:
                return
            shard, reader, block = self._readers.popleft()
            if not block:
                block = (reader.next() or [])[::-1]  # the samples are taken from its end
            if block:
                self._rows.append((shard, block.pop()))
                self._readers.append((shard, reader, block))
            else:
                self._read_out.add(shard)

    def _open(self, shard: int) -> None:
        blocks = self._stream.blocks(shard, self._epoch, self.counts[shard])
        self._readers.append((shard, ReadAhead(blocks, ahead=AHEAD, name=f"raysgd-shard-{shard}"), []))

    def _keep(self, shards: set[int]) -> None:
        """Forget what was read of other shards."""
        for shard, reader, _ in self._readers:
            if shard not in shards:
                reader.stop()
        self._readers = deque(each for each in self._readers if each[0] in shards)
        self._read_out &= shards
        self._rows = [row for row in self._rows if row[0] in shards]
