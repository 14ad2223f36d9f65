"""The batches of a `ShardedStream`, whose shards are assigned to ranks again when the group changes. Worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import default_collate

from raysgd.core.ranks import RankInfo
from raysgd.core.sampling_plan import RankPart
from raysgd.data.sharded_stream import AGAIN, ShardedStream, ShardFeed, ShardStep
from raysgd.torch.data.sources import BatchSource, Votes
from raysgd.training.feed import Drawn

__all__ = ["ShardSource"]

Place = tuple[int, list[int], list[int]]


class ShardSource(BatchSource):
    """Owns the places of an epoch: an offset, how many samples were used of each shard, and which shards have ended. It keeps
    those of the last `keep` steps, because the caller knows which is committed. `step` is the number of samples of all ranks
    in a step (None: `batch_size` on each rank). All ranks take part in each step of `training`. With `pieces`, no rank has more
    than `batch_size` samples at once."""

    counts_samples = True

    def __init__(
        self, stream: ShardedStream, *, training: bool, step: int | None, keep: int, pieces: bool = False
    ) -> None:
        self.loader, self._training, self._step, self._pieces = stream, training, step, pieces
        self._votes = Votes()
        self._places: deque[Place] = deque([self._beginning()], maxlen=keep + 2)
        self._feed: ShardFeed | None = None
        self._open: tuple[RankInfo, int, Iterator[Drawn]] | None = None

    def begin(self, epoch: int, rank_info: RankInfo, shared: bool) -> None:
        super().begin(epoch, rank_info, shared)
        self._reset([self._beginning()])

    def state(self) -> dict[str, Any]:
        return {**super().state(), "places": [list(place) for place in self._places]}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._reset([(at, list(counts), list(ended)) for at, counts, ended in state.get("places", ())])

    def batches(self, rank_info: RankInfo, offset: int) -> Iterator[Drawn]:
        """Return this rank's part of the rest of the epoch: the last call's iterator, if that stopped at `offset`."""
        if self._open is None or self._open[:2] != (rank_info, offset):
            self.close()
            # Later places are those of steps that were not committed. The new ranks may take other samples in them.
            self._reset([place for place in self._places if place[0] <= offset])
            _, counts, ended = self._at(offset) or self._beginning()
            options: dict[str, Any] = {"step": self._step, "pad": self._training}
            self._feed = ShardFeed(self.loader, self._epoch, rank_info, counts, ended, **options)
            self._open = (rank_info, offset, self._generate(self._feed, rank_info, offset))
        return self._open[2]

    def close(self) -> None:
        if self._feed is not None:
            self._feed.close()
        self._feed = self._open = None

    def _generate(self, feed: ShardFeed, rank_info: RankInfo, offset: int) -> Iterator[Drawn]:
        collate, ranks = self.loader.collate_fn or default_collate, rank_info.world_size if self._training else 1
        # A rank can have a full share in any step, also in one of which others have less: so the number is always the same.
        count = -(-(self._step or 1) // (ranks * self.loader.batch_size)) if self._pieces else 1
        try:
            for step in self._steps(feed, rank_info) if self._training else feed.alone():
                offset += step.total
                self._places.append((offset, feed.counts, sorted(feed.ended)))
                assert self._feed is feed and self._open is not None, "only the newest iterator is used"
                self._open = (rank_info, offset, self._open[2])
                samples = step.samples
                weight = len(samples) * ranks / step.total if step.fresh else 0.0
                for part in RankPart(0, len(samples), step.fresh, step.total, weight).pieces(count):
                    batch = collate(samples[part.start : part.stop])
                    yield Drawn(batch, offset, part.fresh, step.total, part.weight, part.whole)
        finally:
            feed.close()
            if self._feed is feed:  # otherwise this is an older iterator, which Python deletes when it likes
                self._feed = self._open = None

    def _steps(self, feed: ShardFeed, rank_info: RankInfo) -> Iterator[ShardStep]:
        while True:
            tally = feed.propose()
            if rank_info.world_size > 1:
                summed = torch.tensor(tally)
                dist.all_reduce(summed, group=self._votes.group)
                tally = summed.tolist()
            step = feed.settle(tally)
            if step is None:
                return
            if step is not AGAIN:
                assert isinstance(step, ShardStep)
                yield step

    def _beginning(self) -> Place:
        return 0, [0] * self.loader.num_shards, []

    def _at(self, offset: int) -> Place | None:
        return next((place for place in self._places if place[0] == offset), None)

    def _reset(self, places: list[Place]) -> None:
        self.close()
        self._places.clear()
        self._places.extend(places)
