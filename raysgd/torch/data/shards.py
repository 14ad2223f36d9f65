"""The batches of a `ShardedStream`, whose shards follow the changes of the group. Worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import default_collate

from raysgd.core.ranks import RankInfo
from raysgd.data.sharded_stream import AGAIN, ShardedStream, ShardFeed, ShardStep
from raysgd.torch.data.sources import BatchSource, Votes
from raysgd.training.step import Drawn

Place = tuple[int, list[int], list[int]]
CLOSE_S = 1.0


def places_in(state: Mapping[str, Any]) -> list[Place]:
    """The places in the state of a source."""
    return [(at, list(counts), list(ended)) for at, counts, ended in state.get("places", ())]


class ShardSource(BatchSource):
    """Owns the places of an epoch: an offset, how many samples were used of each shard, and which
    shards have ended. It keeps those of the last `keep` steps, because the caller knows which is
    committed: one place, and how the later ones differ from it, so that a step's work does not
    depend on the number of shards.

    All ranks take part in each step of `training`.
    """

    def __init__(self, stream: ShardedStream, *, training: bool, keep: int) -> None:
        self.loader, self._training = stream, training
        self._votes = Votes()
        self._keep = keep
        self._places: list[Place] = [self._beginning()]
        self._later: deque[tuple[int, Mapping[int, int], Set[int]]] = deque()
        self._feed: ShardFeed | None = None
        self._open: tuple[RankInfo, int, Iterator[Drawn]] | None = None

    def begin(self, epoch: int, rank_info: RankInfo, shared: bool) -> None:
        super().begin(epoch, rank_info, shared)
        self._reset([self._beginning()])

    def state(self) -> dict[str, Any]:
        return {**super().state(), "places": [list(place) for place in self._known()]}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._reset(places_in(state))

    def batches(self, rank_info: RankInfo, offset: int) -> Iterator[Drawn]:
        """This rank's part of the rest: the last iterator if it stopped at `offset`."""
        if self._open is None or self._open[:2] != (rank_info, offset):
            _, counts, ended = next((place for place in self._known() if place[0] == offset), self._beginning())
            # Later places are those of steps that were not committed. The new ranks may take other samples in them.
            self._reset([(offset, counts, ended)])
            self._feed = ShardFeed(self.loader, self._epoch, rank_info, counts, ended, pad=self._training)
            self._open = (rank_info, offset, self._generate(self._feed, rank_info, offset))
        return self._open[2]

    def close(self) -> None:
        self._forget(CLOSE_S)

    def _generate(self, feed: ShardFeed, rank_info: RankInfo, offset: int) -> Iterator[Drawn]:
        collate = self.loader.collate_fn or default_collate
        try:
            for step in self._steps(feed, rank_info) if self._training else feed.alone():
                offset += step.total
                self._note(offset, step)
                assert self._feed is feed and self._open is not None, "only the newest iterator is used"
                self._open = (rank_info, offset, self._open[2])
                ranks = rank_info.world_size if self._training else 1
                weight = len(step.samples) * ranks / step.total if step.fresh else 0.0
                batch = collate(step.samples)
                own: dict[str, Any] = {"part": rank_info.world_rank, "samples": len(step.samples)}
                yield Drawn(batch, offset, step.fresh, step.total, weight, **own)
        finally:
            feed.close()
            if self._feed is feed:  # otherwise this is an older iterator, which Python deletes when it likes
                self._feed = self._open = None

    def _steps(self, feed: ShardFeed, rank_info: RankInfo) -> Iterator[ShardStep]:
        while True:
            message = feed.propose()
            if message and rank_info.world_size > 1:
                summed = torch.tensor(message)
                dist.all_reduce(summed, group=self._votes.group)
                message = summed.tolist()
            step = feed.settle(message)
            if step is None:
                return
            if step is not AGAIN:
                assert isinstance(step, ShardStep)
                yield step

    def _beginning(self) -> Place:
        return 0, [0] * self.loader.num_shards, []

    def _known(self) -> list[Place]:
        places = list(self._places)
        for later in self._later:
            places.append(_after(places[-1], *later))
        return places

    def _note(self, offset: int, step: ShardStep) -> None:
        self._later.append((offset, step.taken, step.over))
        if len(self._later) > self._keep + 1:
            at, taken, over = self._later.popleft()
            _, counts, ended = self._places[-1]
            for shard, count in taken.items():
                counts[shard] += count
            ended.extend(sorted(over))
            self._places = [(at, counts, ended)]

    def _forget(self, wait_s: float = 0.0) -> None:
        if self._feed is not None:
            self._feed.close(wait_s)
        self._feed = self._open = None

    def _reset(self, places: list[Place]) -> None:
        self._forget()
        self._places = places
        self._later.clear()


def _after(place: Place, offset: int, taken: Mapping[int, int], over: Set[int]) -> Place:
    counts = list(place[1])
    for shard, count in taken.items():
        counts[shard] += count
    return offset, counts, sorted({*place[2], *over})
