"""Loaders that have a position of their own: `state_dict` and `load_state_dict`. Worker."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist

from raysgd.core.ranks import RankInfo
from raysgd.errors import counted
from raysgd.replica.seeding import Places
from raysgd.torch.data.loading import LoaderIterator
from raysgd.torch.data.sources import END, LiveSource
from raysgd.torch.foreign import forget_iterator, live_iterator

logger = logging.getLogger("raysgd")

MARK_EVERY = 32


def has_state(loader: Any) -> bool:
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def marks_in(state: Mapping[str, Any]) -> list[tuple[int, list[Any]]]:
    """The marks in the state of a source."""
    return [(int(at), list(states)) for at, states in state.get("marks", ())]


class StatefulSource(LiveSource):
    """Owns the marks of an epoch: a number of batches, and for each rank the state of its loader
    after them, and whether that is the end of its stream. All ranks make a mark together, after
    every 32 batches and at the end, so that the state of any replica has the position of each rank.

    When all ranks begin with a saved state, each loads its own part of the newest mark, and skips
    the batches after it. If the group changes in the middle of an epoch, the survivors continue,
    and there are no marks until the next epoch: a position belongs to one part of the stream, and
    no rank reads the parts of the old ranks to their end.
    """

    resumable = True

    def __init__(self, loader: Iterable[Any], *, shard: bool, keep: int, places: Places | None = None) -> None:
        super().__init__(loader, shard=shard, together=True, keep=keep, places=places)
        self._keep = keep
        self._generation: int | None = None
        self._marks: list[tuple[int, list[Any]]] = []
        self._loaded: list[tuple[int, list[Any]]] | None = None
        self._marking, self._warned, self._world_size = True, False, 1
        self._base: tuple[int, Any, bool] | None = None  # this rank's part of the newest mark

    def begin(self, epoch: int, rank_info: RankInfo, shared: bool) -> None:
        super().begin(epoch, rank_info, shared)
        self._marks = [mark for mark in self._marks if mark[0] == 0]
        self._marking, self._base = True, None

    def state(self) -> dict[str, Any]:
        return {**super().state(), "marks": self._marks}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._loaded = marks_in(state)

    def batches(self, rank_info: RankInfo, offset: int) -> Iterator[Any]:
        if rank_info.generation != self._generation:
            self._generation = rank_info.generation
            self._marking = self._all(rank_info, self._live is None)
            if self._all(rank_info, self._live is None and self._loaded is not None):
                self._resume(rank_info, offset)
            self._loaded = None
            if not self._marking:
                self._marks = []
        return super().batches(rank_info, offset)

    def _resume(self, rank_info: RankInfo, offset: int) -> None:
        mark = max((each for each in self._loaded or () if each[0] <= offset), default=None, key=lambda each: each[0])
        if mark is not None and len(mark[1]) == rank_info.world_size:
            self._marks, self._base, self._batch_count = [mark], (mark[0], *mark[1][rank_info.world_rank]), offset
        elif mark is not None or offset:
            reason = "workers had failed or joined in that epoch"
            if mark is not None:
                reason = f"the position is that of {counted(len(mark[1]), 'worker')}, and there are {rank_info.world_size} now"
            logger.warning(
                "rank %d: the %s begins %s from its beginning, because %s. Some samples are used twice",
                rank_info.world_rank,
                type(self.loader).__name__,
                "this epoch again" if offset else "its next epoch",
                reason,
            )

    def _opened(self, rank_info: RankInfo) -> Iterator[Any]:
        self._world_size = rank_info.world_size
        return super()._opened(rank_info) if self._base is None else self._resumed(rank_info, *self._base)

    def _resumed(self, rank_info: RankInfo, at: int, state: Any, finished: bool) -> Iterator[Any]:
        """Make an iterator that continues after the returned batches, and draws no numbers."""
        sources = self._generators()
        now = [source.get_state() for source in sources]
        loader = self._part(rank_info)
        if live_iterator(loader) is not None:
            forget_iterator(loader)
        loader.load_state_dict(copy.deepcopy(state))
        live: Iterator[Any] = LoaderIterator(loader)
        if at == 0:
            # The state is that of the end of an epoch. Some loaders first find no batch, others begin the next pass.
            first = next(live, END)
            live = chain([first], live) if finished and first is not END else LoaderIterator(loader)
        deque(islice(live, self._batch_count - at), maxlen=0)
        for source, generator_state in zip(sources, now, strict=True):
            source.set_state(generator_state)
        return live

    def _next(self) -> Any:
        batch = super()._next()
        if self._marking and self._batch_count % MARK_EVERY == 1:  # some loaders have no state before their first batch
            self._mark(self._batch_count)
        return batch

    def _end(self, *, finished: bool) -> None:
        self._marks = []
        if self._marking:
            self._mark(0, finished=finished)  # the position at which the next epoch begins

    def _mark(self, at: int, *, finished: bool = False) -> None:
        mine = (copy.deepcopy(self._used.state_dict()), finished)
        states = [mine]
        if self._world_size > 1:
            states = [mine] * self._world_size
            dist.all_gather_object(states, mine, group=self._group)
        if not self._marks and self._loses(states):
            return
        self._base = (at, *mine)
        self._marks.append((at, states))
        while len(self._marks) > 1 and self._marks[1][0] <= self._batch_count - self._keep:
            self._marks.pop(0)

    def _loses(self, states: list[Any]) -> bool:
        """Whether a checkpoint cannot hold these states, which are alike on all ranks."""
        buffer = io.BytesIO()
        torch.save(states, buffer)
        buffer.seek(0)
        try:
            torch.load(buffer, weights_only=True)
        except pickle.UnpicklingError as error:
            self._marking, warned, self._warned = False, self._warned, True
            if warned:
                return True
            logger.warning(
                "the position in the %s is not saved, because the result of its state_dict() contains objects that a checkpoint "
                "cannot hold: let it return numbers, strings, lists, dictionaries and tensors (%s)",
                type(self.loader).__name__,
                str(error).partition("\n")[0][:200],
            )
        return not self._marking
