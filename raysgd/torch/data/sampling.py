"""The order of an epoch, from the user's sampler, and loaders that follow a plan. Worker."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from raysgd.core.decisions.sampling_plan import Division, RankShare, SamplingPlan
from raysgd.errors import ConfigError
from raysgd.replica.seeding import seed_generators
from raysgd.torch.foreign import loader_with

# The units of an epoch in their order: sample indices (a range, a tensor) or whole batches of a user's batch sampler.
Order = range | torch.Tensor | list[Any]


def is_planned(loader: Any) -> bool:
    """Whether an epoch is divided by index, as that of a map-style DataLoader."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def has_own_batches(loader: DataLoader[Any]) -> bool:
    """Whether the user passed a batch sampler, whose batches are not divided. (Only such a loader
    has a batch sampler but no batch size.)"""
    return loader.batch_sampler is not None and loader.batch_size is None


def plan_of(loader: DataLoader[Any], total: int, division: Division, *, world_size: int, pad: bool) -> SamplingPlan:
    """Plan how an epoch of `total` units is divided."""
    step, drops = (loader.batch_size or 1) * division.batches, bool(getattr(loader, "drop_last", False))
    return SamplingPlan(total, step, division.parts, world_size, drop_last=drops and pad, pad=pad, deal=division.deal)


def planned_epoch(loader: DataLoader[Any], workers: int) -> SamplingPlan:
    """Plan how this many workers divide an epoch of training, without drawing its order."""
    units: Any = loader.batch_sampler if has_own_batches(loader) else loader.sampler
    if isinstance(units, DistributedSampler):  # one for a single rank replaces it
        units = units.dataset
    return plan_of(loader, len(units), Division(workers, workers), world_size=workers, pad=True)


def batches_per_epoch(loader: Any, workers: int, *, divided: bool) -> int | None:
    """How many batches each of these workers has in an epoch of training, or None if data has no
    length. Data that is not `divided` belongs to one worker."""
    try:
        if divided and is_planned(loader):
            return planned_epoch(loader, workers).steps_left(0)
        in_parts = divided and workers > 1 and isinstance(loader, DataLoader)  # each worker finds its part by itself
        return None if in_parts else len(loader)
    except (TypeError, NotImplementedError):  # len() raises these
        return None


def set_epoch(loader: Any, epoch: int) -> None:
    """Call `set_epoch(epoch)` on every part of the loader that has it, and on data sets in its data
    set (a `Subset`, a `ConcatDataset`)."""
    parts, seen = (
        [loader, *(getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset"))],
        set[int](),
    )
    while parts:
        part = parts.pop(0)
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        method = getattr(part, "set_epoch", None)
        if callable(method):
            method(epoch)
        if isinstance(part, Dataset):
            inner = getattr(part, "datasets", ())
            parts += [getattr(part, "dataset", None), *(inner if isinstance(inner, (list, tuple)) else ())]


@dataclass(frozen=True)
class Recipe:
    """What the order of one of torch's own samplers depends on. Another process draws the same
    order from it.

    samples, count  how many samples the data set has, and how many the sampler draws
    seed            of a generator that is made for this epoch; with `state`, that is the
                    generator's state instead
    shuffle         of a DistributedSampler (None: it is a RandomSampler)
    """

    samples: int
    count: int
    seed: int = 0
    state: bytes = b""
    replacement: bool = False
    shuffle: bool | None = None

    @classmethod
    def of(cls, sampler: Any) -> Recipe | None:
        """The recipe of the sampler's next order, None if only the sampler can draw it."""
        if type(sampler) is DistributedSampler and sampler.num_replicas == 1:
            samples = len(sampler.dataset)  # type: ignore[arg-type]
            return cls(samples, len(sampler), seed=sampler.seed + sampler.epoch, shuffle=sampler.shuffle)
        if type(sampler) is not RandomSampler:
            return None
        samples, count, generator = len(sampler.data_source), sampler.num_samples, sampler.generator
        if generator is not None:
            if generator.device.type != "cpu":
                return None
            return cls(samples, count, state=generator.get_state().numpy().tobytes(), replacement=sampler.replacement)
        ahead = torch.Generator()
        ahead.set_state(torch.get_rng_state())
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=ahead).item())
        return cls(samples, count, seed=seed, replacement=sampler.replacement)

    def order(self) -> Order:
        if self.shuffle is not None:
            data: Any = range(self.samples)
            return _in_order(DistributedSampler(data, num_replicas=1, rank=0, shuffle=self.shuffle, seed=self.seed))
        generator = torch.Generator().manual_seed(self.seed)
        if self.state:
            generator.set_state(torch.frombuffer(bytearray(self.state), dtype=torch.uint8))
        data = range(self.samples)
        return _in_order(RandomSampler(data, replacement=self.replacement, num_samples=self.count, generator=generator))


def _in_order(sampler: Any) -> Order:
    units = list(sampler)
    if set(map(type, units)) == {int}:
        return torch.tensor(units, dtype=torch.int64)
    return units


def epoch_order(loader: DataLoader[Any]) -> tuple[Order, Recipe | None]:
    """Draw the order of the user's sampler for all ranks, with its recipe if it has one. A
    DistributedSampler is replaced by one for a single rank.

    A DataLoader draws a seed for its processes before it reads its sampler. This function does so,
    too, so that a plain loop from the same random state has the same order.
    """
    sampler: Any = loader.batch_sampler if has_own_batches(loader) else loader.sampler
    torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
    if type(sampler) is SequentialSampler:
        return range(len(sampler)), None
    if isinstance(sampler, DistributedSampler):
        alone: Any = DistributedSampler(
            sampler.dataset, num_replicas=1, rank=0, shuffle=sampler.shuffle, seed=sampler.seed
        )
        alone.set_epoch(sampler.epoch)
        sampler = alone
    if not hasattr(type(sampler), "__len__"):
        raise ConfigError(
            f"the sampler {type(sampler).__name__} has no length, so its epoch cannot be divided among workers: give "
            "it a __len__, use an IterableDataset, or pass add_dist_sampler=False and divide the data yourself"
        )
    recipe = Recipe.of(sampler)  # before the sampler draws, which changes the random states
    return _in_order(sampler), recipe


def agree(order: Order, recipe: Recipe | None, *, first: bool) -> tuple[Order, Recipe | None]:
    """Take rank 0's order on every rank, because samplers draw from random states that differ
    between processes, and its recipe, if it has one. `first` is whether this is rank 0. It sends a
    recipe, which is small, and the others draw the same order. It first draws the order once more,
    so that a torch whose sampler draws in another way is noticed."""
    sent = (recipe if recipe is not None and _equal(recipe.order(), order) else order) if first else None
    message = _from_rank_0(sent)
    if not isinstance(message, Recipe):
        assert message is not None
        return message, None
    return order if first or message == recipe else message.order(), message


def _from_rank_0(value: Any) -> Any:
    """Take rank 0's value. A training function can have initialized Horovod only."""
    hvd = sys.modules.get("horovod.torch")
    if dist.is_initialized():
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]
    if hvd is not None and hvd.is_initialized():
        return hvd.broadcast_object(value, root_rank=0, name="raysgd.order")
    raise ConfigError(
        "the ranks cannot agree on the order of the samples, because neither torch's process group nor Horovod is "
        "initialized: with backend='horovod', call hvd.init() before the loop over the loader"
    )


def _equal(one: Order, other: Order) -> bool:
    return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and torch.equal(one, other)


def random_sources(loader: DataLoader[Any]) -> list[torch.Generator]:
    """The user's generators of the loader and samplers: part of the position."""
    sources: list[torch.Generator] = []
    for part in (loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)):
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not known for known in sources):
            sources.append(generator)
    return sources


class Picker:
    """The batch sampler of a planned loader: yields one rank's units, step by step. Its plan is
    replaced in place, because persistent loader processes keep the sampler that they started with.
    With `tensors`, the units are tensors or ranges as the order is, instead of lists. Unless code
    of the user reads them `elsewhere`, in a process of the loader, it does so when they are
    yielded."""

    def __init__(self, *, own_batches: bool, batched: bool) -> None:
        self._own_batches, self._batched, self.tensors, self.elsewhere = own_batches, batched, False, False
        self._number: Callable[..., int] | None = None
        self._order: Order = range(0)
        self._plan = SamplingPlan(total=0, step_size=1, parts=1, world_size=1)
        self._rank = self._offset = 0
        self._shares: deque[tuple[int, RankShare]] = deque()

    def follow(
        self,
        order: Order,
        plan: SamplingPlan,
        rank: int,
        offset: int,
        number: Callable[..., int] | None = None,
    ) -> deque[tuple[int, RankShare]]:
        """Replace the plan. Return where the loader's next pass will add, for each batch that it
        begins to read, the offset after its step, and the part. `number` returns the seed for
        reading the part from an offset on."""
        if self.tensors and isinstance(order, torch.Tensor) and len(order) and int(order.min()) < 0:
            order = order.tolist()
        self._order, self._plan, self._rank, self._offset = order, plan, rank, offset
        self._number = None if self.tensors else number  # what gathers draws nothing
        self._shares = deque()  # a loader's thread may still add to the one before
        return self._shares

    def _in_samples(self, part: RankShare, after: int) -> RankShare:
        """Give a part the weight of its samples: batches can have different sizes."""
        offset = after - part.rows
        try:
            batches: Any = self._order[offset:after]
            sizes = [len(batch) for batch in batches]
        except TypeError:  # batches without a length: each of them counts the same
            return part
        rows, mine = sum(sizes), sum(sizes[part.start - offset : part.stop - offset])
        weight = mine * self._plan.world_size / rows if part.fresh and rows else 0.0
        return part._replace(rows=rows, weight=weight)

    def __len__(self) -> int:
        return sum(1 for _ in self._plan.parts_of(self._rank, self._offset))

    def __iter__(self) -> Iterator[Any]:
        order, own_batches, shares, number = self._order, self._own_batches, self._shares, self._number
        unchanged = self.tensors and isinstance(order, (torch.Tensor, range))
        for after, part in self._plan.parts_of(self._rank, self._offset):
            shares.append((after, self._in_samples(part, after) if own_batches else part))
            units: Any = order[part.start : part.stop]
            if not unchanged:
                units = units.tolist() if isinstance(units, torch.Tensor) else list(units)
            if own_batches:
                units = [index for batch in units for index in batch]
            units = units if self._batched else units[0]
            if number is not None and self.elsewhere:
                units = Units(number(offset=part.start), units)
            elif number is not None:
                seed_generators(number(offset=part.start))
            yield units


class Units(NamedTuple):
    """What a loader process gets as `units`. When it gets them, it seeds its generators, and it
    reads them next."""

    seed: int
    units: Any

    def __reduce__(self) -> Any:
        return _units_to_read, tuple(self)


def _units_to_read(seed: int, units: Any) -> Any:
    seed_generators(seed)
    return units


def with_sampler(loader: DataLoader[Any], picker: Picker, *, pinned: bool = False) -> DataLoader[Any] | Gathered:
    """Make a copy of a loader, with all its options and a planned sampler, or what gathers equal
    batches into `pinned` memory, without a loader: on CPUs, that was slower."""
    changed: dict[str, Any] = {"sampler": picker, "generator": torch.Generator().manual_seed(torch.initial_seed())}
    if can_gather(loader):
        picker.tensors = True
        pinned = pinned or (loader.pin_memory and torch.cuda.is_available())
        gathered = Gathered(loader.dataset, picker, pinned=pinned)  # type: ignore[arg-type]
        if pinned:
            return gathered
        changed |= {"dataset": gathered, "collate_fn": list}  # of what is a list already
    picker.elsewhere = loader.num_workers > 0
    if loader.batch_sampler is not None:
        changed["batch_sampler"] = picker
    return loader_with(loader, **changed)


def split_last_step(order: Order, count: int, offset: int) -> Order:
    """The batches of an epoch, with those of a short last step divided into this many parts.

    Otherwise a rank would have to repeat a batch, although there are enough samples.
    """
    units = list(order)
    rest = (len(units) - offset) % count
    if rest == 0:
        return order
    tail = [index for batch in units[-rest:] for index in batch]
    if len(tail) < count:
        return order
    parts = SamplingPlan(len(tail), len(tail), parts=count, world_size=count).step_at(0)
    return [*units[:-rest], *(tail[part.start : part.stop] for part in parts)]


# -- gathering: a `TensorDataset` is read with one index operation for each batch, with equal results --------


class Gathered:
    """The batches of a `TensorDataset` that a picker chooses.

    If they are `pinned`, a batch is copied once before it is sent to a GPU. torch gives the memory
    to another batch when nothing refers to this one and its copy on the GPU is done.
    """

    def __init__(self, dataset: TensorDataset, picker: Iterable[Any], *, pinned: bool = False) -> None:
        self._dataset, self._picker, self._pinned = dataset, picker, pinned

    def __iter__(self) -> Generator[Any]:
        for units in self._picker:
            yield self.__getitems__(units)

    def __getitems__(self, indices: list[Any] | torch.Tensor | range) -> Any:
        tensors = self._dataset.tensors
        if self._pinned and isinstance(indices, (torch.Tensor, range)):
            return [_pinned_rows(tensor, indices) for tensor in tensors]
        if isinstance(indices, range):
            return [tensor.narrow(0, indices.start, len(indices)).clone() for tensor in tensors]
        if isinstance(indices, torch.Tensor):  # not negative, so `index_select` has the same result, faster
            return [torch.index_select(tensor, 0, indices) for tensor in tensors]
        if set(map(type, indices)) != {int}:  # a user's sampler may yield indices of any type
            return default_collate([self._dataset[index] for index in indices])
        chosen = torch.tensor(indices)
        return [tensor[chosen] for tensor in tensors]


def _pinned_rows(tensor: torch.Tensor, chosen: torch.Tensor | range) -> torch.Tensor:
    size = len(chosen), *tensor.shape[1:]
    into = torch.empty(size, dtype=tensor.dtype, device="cpu", pin_memory=True)
    if isinstance(chosen, range):
        return into.copy_(tensor.narrow(0, chosen.start, len(chosen)))
    return torch.index_select(tensor, 0, chosen, out=into)


def can_gather(loader: DataLoader[Any]) -> bool:
    """Whether the loader's batches are rows of plain tensors in main memory.

    Loaders with processes are excluded: the processes cost more than they save here, but the user
    asked for them, and they must see the user's own data set.
    """
    dataset = loader.dataset
    return (
        type(loader) is DataLoader
        and type(dataset) is TensorDataset
        and loader.collate_fn is default_collate
        and loader.batch_sampler is not None
        and loader.num_workers == 0
        and all(map(_is_plain, dataset.tensors))
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and not tensor.is_quantized
    )
