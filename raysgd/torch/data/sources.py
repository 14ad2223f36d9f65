"""Sources of one rank's batches; the rest of an epoch is divided among new ranks. Worker."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from raysgd.core.decisions.sampling_plan import Division, SamplingPlan
from raysgd.core.outcomes import DataLoaderFailure
from raysgd.core.ranks import RankInfo
from raysgd.core.tree import mapped
from raysgd.ray_data.columns import RayData
from raysgd.replica.seeding import Places, derived_seed
from raysgd.replica.steps.position import Position
from raysgd.replica.steps.step import Drawn
from raysgd.torch.data import sampling
from raysgd.torch.data.iterable import sharded_live
from raysgd.torch.data.loading import LoaderIterator
from raysgd.torch.foreign import end_processes, forget_iterator, live_iterator, ranks_asked

ENDED_EARLY = (
    "a DataLoader ended before its sampler did. Most likely the data set, a transform or the collate_fn raised StopIteration, as next() "
    "does at the end of an iterator, and Python took it for the end of the loader. Catch it there, or pass next() a default"
)

SAMPLER_DIVIDES = (
    "the sampler %s asks torch.distributed for the rank, or for the number of ranks. raysgd divides what rank 0's sampler draws, so a "
    "sampler that draws only the part of one rank leaves out the other rows. Let it draw the order of all rows, or divide the data "
    "yourself with add_dist_sampler=False"
)

logger = logging.getLogger("raysgd")

END = object()  # what follows the last batch of a live source


class BatchSource:
    """What all sources have in common. By default the length of an epoch is not known, nothing
    happens when an epoch begins, and the position is the only state."""

    loader: Any
    voted_s = 0.0  # in which this rank has waited for the others' votes
    _epoch = 0

    def begin(self, epoch: int, rank_info: RankInfo, shared: bool) -> None:
        self._epoch = epoch
        sampling.set_epoch(self.loader, epoch)

    def batches(self, rank_info: RankInfo, offset: int) -> Iterator[Drawn]:
        """This rank's part of the rest of the epoch."""
        raise NotImplementedError

    def steps_left(self, rank_info: RankInfo, offset: int) -> int | None:
        """How many more batches the epoch has for every rank, None if not known."""
        return None

    def state(self) -> dict[str, Any]:
        """What another process needs besides the position to continue this epoch."""
        return {"epoch": self._epoch}

    def state_for_peers(self) -> dict[str, Any]:
        """The same for another worker of this trainer, in any form that `load` takes."""
        return self.state()

    def load(self, state: dict[str, Any]) -> None:
        """Take the state of a source in another process."""
        BatchSource.begin(self, state["epoch"], RankInfo(), shared=False)

    def close(self) -> None:
        """End what reads in the background."""


class PlannedSource(BatchSource):
    """A map-style loader. Every sample is used once per epoch, over any number of resizes.

    Owns the epoch's order, in evaluations all since the call began, because it can begin again. The
    caller owns the offset, because only committed batches count. `division` returns how a step is
    divided now, for a number of ranks. Where code of the user reads a part, the generators are
    seeded for its place among `places`. `device` is where the batches are used.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        pad: bool,
        division: Callable[[int], Division] = lambda ranks: Division(ranks, ranks),
        places: Places | None = None,
        position: Position | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.loader, self._pad, self._division, self._places = loader, pad, division, places
        self._position, self._known = position or Position(), dict[int, tuple[sampling.Order, sampling.Recipe | None]]()
        self._own_batches = own_batches = sampling.has_own_batches(loader)
        self._picker = sampling.Picker(own_batches=own_batches, batched=own_batches or loader.batch_size is not None)
        self._twin = sampling.with_sampler(loader, self._picker, pinned=device is not None and device.type == "cuda")
        self._seed = torch.initial_seed()
        self.order: sampling.Order = range(0)
        self._recipe: sampling.Recipe | None = None  # of the order, if all ranks have drawn it from that
        self._begun: tuple[int, list[torch.Tensor]] | None = None  # the newest epoch, and the generators before it
        self._begins = False  # whether it may have to begin again, as no batches of it were asked for
        self._orders: int | None = None  # what the orders are drawn from in a process that has joined a run
        self._open: tuple[tuple[RankInfo, Division], int, Generator[Drawn]] | None = None
        self._live: Generator[Any] | LoaderIterator | None = None  # the open pass over the twin

    def begin(self, epoch: int, rank_info: RankInfo, shared: bool) -> None:
        """Take the new epoch's order from rank 0's sampler. Every rank still draws an order from
        its own sampler, so that their random states stay equal and any of them can become rank
        0."""
        super().begin(epoch, rank_info, shared)
        self._drop()  # a pass that ended early with a deal; its processes may have an older data set
        order, recipe = self._known.get(epoch) or self._draw(epoch, rank_info, shared)
        self.order, self._recipe = order, None
        if shared and rank_info.world_size > 1 and not isinstance(order, range):
            self.order, self._recipe = order, recipe = sampling.agree(order, recipe, first=rank_info.world_rank == 0)
        if not self._pad:
            known, first = {**self._known, epoch: (order, recipe)}, self._position.call_epoch - 1
            self._known = {each: pair for each, pair in known.items() if each >= first}

    def _draw(self, epoch: int, rank_info: RankInfo, shared: bool) -> tuple[sampling.Order, sampling.Recipe | None]:
        generators = [torch.default_generator, *sampling.random_sources(self.loader)]
        if self._begun is not None and self._begun[0] == epoch:  # a failure has ended the first try
            for generator, before in zip(generators, self._begun[1], strict=True):
                generator.set_state(before)
        self._begun, self._begins = (epoch, [generator.get_state() for generator in generators]), True
        with torch.random.fork_rng(devices=[], enabled=self._orders is not None):
            if self._orders is not None:
                torch.default_generator.manual_seed(derived_seed(self._orders, epoch))
            with ranks_asked() as asked:
                drawn = sampling.epoch_order(self.loader)
        if asked and shared and epoch == 0 and rank_info.world_rank == 0:
            sampler = self.loader.batch_sampler if self._own_batches else self.loader.sampler
            logger.warning(SAMPLER_DIVIDES, type(sampler).__name__)
        return drawn

    @property
    def units(self) -> int | None:
        """How many rows an epoch of the loader has, None if a batch sampler decides that."""
        return None if self._own_batches else len(self.loader.sampler)

    def state(self) -> dict[str, Any]:
        """The order of this epoch, and the generators' states for the next ones."""
        order = None if isinstance(self.order, range) else self.order
        generators = [source.get_state() for source in sampling.random_sources(self.loader)]
        if self._begun is not None and self._begins and self._epoch not in self._known:
            generators = self._begun[1][1:]
        return {**super().state(), "order": order, "generators": generators}

    def state_for_peers(self) -> dict[str, Any]:
        """The state with the order's recipe, if it has one, in place of the order: with millions of
        samples, a snapshot after a short call would copy and send many MB. A new process, whose
        generators are young, draws further orders from what these were drawn from."""
        orders = torch.initial_seed() if self._orders is None else self._orders
        drawn = {} if self._places is not None or sampling.random_sources(self.loader) else {"orders": orders}
        recipe = {} if self._recipe is None else {"order": None, "recipe": self._recipe}
        known = {
            epoch: (order if its_recipe is None else None, its_recipe)
            for epoch, (order, its_recipe) in self._known.items()
        }
        return {**self.state(), **drawn, **recipe, **({"known": known} if known else {})}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self._orders = state.get("orders") if self._begun is None else self._orders
        self._begun, self._begins = (-1, []), False
        recipe, order = state.get("recipe"), state.get("order")
        if isinstance(recipe, sampling.Recipe):  # never from a file
            order = self.order if recipe == self._recipe else recipe.order()
        self._recipe = recipe if isinstance(recipe, sampling.Recipe) else None
        self.order = range(len(self.loader.sampler)) if order is None else order
        known = {} if self._pad else state.get("known", {})
        self._known = {
            epoch: (drawn if its_recipe is None else its_recipe.order(), its_recipe)
            for epoch, (drawn, its_recipe) in known.items()
        }
        self._drop()
        for source, saved in zip(sampling.random_sources(self.loader), state.get("generators", ()), strict=False):
            source.set_state(saved)

    def batches(self, rank_info: RankInfo, offset: int) -> Iterator[Drawn]:
        """This rank's part of the rest: the last iterator if it stopped at `offset`. If only the
        deal is another one, the loader's processes continue. Another source of the same data set
        may have set its epoch meanwhile."""
        if not self._begins:
            sampling.set_epoch(self.loader, self._epoch)
        self._begins = False
        key = rank_info, self._division(rank_info.world_size)
        if self._open is not None and self._open[:2] == (key, offset):
            return self._open[2]
        self._drop(keep=self._open is not None and _differ_in_deal(self._open[0], key))
        fresh = self._generate(rank_info, offset)
        self._open = (key, offset, fresh)
        return fresh

    def _generate(self, rank_info: RankInfo, offset: int) -> Generator[Drawn]:
        if self._pad and self._own_batches:
            self.order = sampling.split_last_step(self.order, self._division(rank_info.world_size).batches, offset)
        places, epoch = self._places, self._epoch + 1
        seed = torch.initial_seed() if places is None else places.number(epoch=epoch)
        if self._seed != seed and not isinstance(self._twin, sampling.Gathered):
            self._seed = seed
            self._twin.generator.manual_seed(seed)  # the processes of the loader get their seeds from it
        number = None if places is None else partial(places.number, epoch=epoch, reading=True)
        shares = self._picker.follow(self.order, self._plan(rank_info), rank_info.world_rank, offset, number)
        try:
            batches = iter(self._twin) if isinstance(self._twin, sampling.Gathered) else LoaderIterator(self._twin)
            with closing(batches) as self._live:
                for batch in self._live:
                    if not shares:
                        raise RuntimeError(
                            "a DataLoader yields more batches than its sampler: its class must not add any"
                        )
                    after, part = shares.popleft()
                    assert self._open is not None
                    self._open = (self._open[0], after, self._open[2])
                    units = self.order[part.start : part.stop]
                    rows = units.tolist() if isinstance(units, torch.Tensor) else list(units)
                    if self._own_batches:
                        rows = [row for own_batch in rows for row in own_batch]
                    samples = None if self.loader.batch_sampler is None else len(rows)
                    details = part.fresh, part.rows, part.weight, part.last_part, rows, part.start, part.part, samples
                    yield Drawn(batch, after, *details)
            if shares:
                raise RuntimeError(ENDED_EARLY)
        except (Exception, DataLoaderFailure):
            self._open = None  # a generator that raised has no more batches, but the epoch has
            raise
        finally:
            self._live = None  # otherwise processes that are forked later would have a copy of it
        self._open = None

    def close(self) -> None:
        """End the loader's processes. If only the garbage collector did it, torch would wait 5 s
        for each: their queues are collected first, so they would not be asked to end."""
        self._drop()
        end_processes(live_iterator(self._twin))  # they persist from one epoch to the next

    def _drop(self, *, keep: bool = False) -> None:
        """End an iterator that is not continued; its processes may `keep` reading."""
        if keep and isinstance(self._live, LoaderIterator):
            self._live.keep()
        if self._open is not None:
            self._open[2].close()
            self._open = None
        iterator = live_iterator(self._twin)
        if iterator is not None and not (keep or self.loader.persistent_workers):  # for a pass that was not begun
            end_processes(iterator)
            forget_iterator(self._twin)

    def steps_left(self, rank_info: RankInfo, offset: int) -> int:
        return self._plan(rank_info).steps_left(offset)

    def _plan(self, rank_info: RankInfo) -> SamplingPlan:
        ranks = rank_info.world_size
        return sampling.plan_of(self.loader, len(self.order), self._division(ranks), world_size=ranks, pad=self._pad)


def _differ_in_deal(one: tuple[RankInfo, Division], other: tuple[RankInfo, Division]) -> bool:
    """Whether two divisions for one rank have different deals, and else are the same."""
    return one != other and (one[0], one[1]._replace(deal=other[1].deal)) == other


class LiveSource(BatchSource):
    """Anything that is iterated: an IterableDataset's loader, a list of batches, a generator, a
    user's own sharding.

    Its live iterator has the position, which another process cannot take over. With `together`, the
    epoch ends on all ranks when one of them has no more batches. After a `DataLoaderFailure`, the
    stream begins again from the same random states, and the batches that it has returned before are
    skipped.
    """

    resumable = False

    def __init__(
        self, loader: Iterable[Any], *, shard: bool, together: bool, keep: int = 1, places: Places | None = None
    ) -> None:
        self.loader, self._shard, self._together, self._places = loader, shard, together, places
        self._used: Any = loader
        self._live: Iterator[Any] | None = None
        self._last_batches: deque[Drawn] = deque(maxlen=keep)
        self._votes: Any = None
        self._batch_count = 0
        self._randomness: list[torch.Tensor] = []
        self._place: tuple[int, int] | None = None  # the rank and the number of ranks of the newest part

    def begin(self, epoch: int, rank_info: RankInfo, shared: bool) -> None:
        goes_on = self._live is not None and epoch == self._epoch  # an evaluation continues its pass
        super().begin(epoch, rank_info, shared)
        if not goes_on:
            self._live, self._batch_count = None, 0
            self._last_batches.clear()

    def batches(self, rank_info: RankInfo, offset: int) -> Iterator[Drawn]:
        """Yield first what was drawn before a worker failed, but was not committed. An evaluation
        that begins elsewhere reads its pass again."""
        again = [drawn for drawn in self._last_batches if drawn.offset > offset]
        if not (self._together or self._batch_count - len(again) == offset or hasattr(self.loader, "__next__")):
            self._live, self._batch_count, again = None, offset, []
            self._last_batches.clear()
        if self._live is None:
            self._enter(offset + 1, rank_info)
            self._live = self._opened(rank_info)
        while True:
            offset += 1
            if again:
                drawn = again.pop(0)
            else:
                self._enter(offset, rank_info)
                drawn = Drawn(self._next(), offset, part=rank_info.world_rank)
                self._last_batches.append(drawn)  # before the vote, which fails if a peer has failed
            if not self._all(rank_info, drawn.batch is not END):
                self._end(finished=drawn.batch is END)
                self._live = None
                self._last_batches.clear()
                return
            yield drawn

    def _enter(self, offset: int, rank_info: RankInfo) -> None:
        if self._places is not None:
            self._places.enter(epoch=self._epoch + 1, offset=offset, part=rank_info.world_rank, reading=True)

    def _opened(self, rank_info: RankInfo) -> Iterator[Any]:
        """Open a new iterator; in an epoch, one that continues after the returned batches."""
        sources = self._generators()
        now = [source.get_state() for source in sources]
        if self._batch_count:
            for source, begun in zip(sources, self._randomness or now, strict=True):
                source.set_state(begun)
        else:
            self._randomness = now
        live = LoaderIterator(self._part(rank_info))
        if self._batch_count:
            deque(islice(live, self._batch_count), maxlen=0)
            for source, state in zip(sources, now, strict=True):
                source.set_state(state)
        return live

    def _end(self, *, finished: bool) -> None:
        """Called when the epoch ends; `finished` is whether this rank's iterator has ended, too."""

    def _part(self, rank_info: RankInfo) -> Any:
        """A loader of this rank's part of the stream. Processes that persist have a data set of the
        part before."""
        place = rank_info.world_rank, rank_info.world_size
        if self._shard and self._place not in (None, place) and getattr(self.loader, "persistent_workers", False):
            end_processes(live_iterator(self.loader))
            forget_iterator(self.loader)
        self._place = place
        self._used = sharded_live(self.loader, rank_info, warns=self._epoch == 0) if self._shard else self.loader
        return self._used

    def _generators(self) -> list[torch.Generator]:
        sources = sampling.random_sources(self.loader) if isinstance(self.loader, DataLoader) else []
        return [torch.default_generator, *sources]

    def _next(self) -> Any:
        assert self._live is not None
        try:
            batch = next(self._live, END)
        except DataLoaderFailure:
            self._live = None
            raise
        self._batch_count += 1
        return batch

    @property
    def _group(self) -> Any:
        """The group in which ranks agree on batches: gloo, so that no GPU waits."""
        if self._votes is None or self._votes[0] is not dist.group.WORLD:
            group = dist.new_group(backend="gloo") if dist.get_backend() != "gloo" else None
            self._votes = (dist.group.WORLD, group)
        return self._votes[1]

    def _all(self, rank_info: RankInfo, mine: bool) -> bool:
        """Whether this is so on all ranks."""
        if not self._together or rank_info.world_size == 1:
            return mine
        began, answer = perf_counter(), torch.tensor([int(mine)])
        dist.all_reduce(answer, op=dist.ReduceOp.MIN, group=self._group)
        self.voted_s += perf_counter() - began
        return bool(answer.item())


class RowSource(BatchSource):
    """A Ray Dataset. Its rows are divided by their position in its stream, which is read once for
    all ranks.

    Owns the number of the current pass, by which all ranks identify it. The position in the pass is
    in `position`. `rows` reads the rows, `own_call` is whether the data set is for one call only,
    and `keep` is how many batches can be uncommitted.
    """

    def __init__(
        self,
        loader: Any,
        rows: Any,
        data: RayData,
        position: Position,
        *,
        own_call: bool,
        pad: bool,
        keep: int,
    ) -> None:
        self.loader, self._rows, self._data, self._position = loader, rows, data, position
        self._pad, self._keep = pad, keep
        self._number = (position.call if own_call else -1, position.epoch)

    def begin(self, epoch: int, rank_info: RankInfo, shared: bool) -> None:
        self._number = (self._number[0], epoch + 1)

    def state(self) -> dict[str, Any]:
        return {"number": self._number}

    def load(self, state: dict[str, Any]) -> None:
        self._number = tuple(state.get("number", self._number))

    def batches(self, rank_info: RankInfo, offset: int) -> Iterator[Drawn]:
        ranks = rank_info.world_size
        step = (self._data.batch_size or 1) * ranks
        place: dict[str, Any] = {"call": self._position.call, "number": self._number, "start": offset}
        for columns, after, fresh in self._rows.read(rank_info, **place, step=step, pad=self._pad, keep=self._keep):
            units, count = after - offset, len(next(iter(columns.values())))
            offset = after
            weight = count * ranks / units if fresh else 0.0
            batch = mapped(_tensor, self._data.arranged(columns))
            yield Drawn(batch, after, fresh, units, weight, part=rank_info.world_rank, samples=count)


def _tensor(column: Any, *_: Any) -> Any:
    """Convert a column to a tensor; a floating-point one in torch's default type."""
    tensor = torch.as_tensor(column)
    return tensor.to(torch.get_default_dtype()) if tensor.is_floating_point() else tensor
