"""Data loaders of functions: one rank's part, and one that survives a resize. Worker."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping
from operator import length_hint
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from raysgd.core.ranks import RankInfo
from raysgd.core.tree import leaves
from raysgd.errors import ConfigError
from raysgd.replica.seeding import derived_seed
from raysgd.replica.steps.feed import Carrier
from raysgd.replica.steps.step import Drawn
from raysgd.torch.data.loading import LoaderIterator
from raysgd.torch.data.prefetch import make_carrier
from raysgd.torch.data.sampling import batches_per_epoch, is_planned
from raysgd.torch.data.sources import PlannedSource
from raysgd.torch.foreign import loader_with
from raysgd.torch.registered import move
from raysgd.train.sessions import Session

END = object()  # after the batches of a pass
LACKS = (
    "train.elastic has not got the %s that this function trains with. After a worker failure, training would continue with a new one. "
    "Write train.elastic({..., %s})"
)


def distribute(loader: DataLoader[Any], rank_info: RankInfo) -> DataLoader[Any]:
    """Make a copy of the loader, with the same options, that reads this rank's part. Loaders that
    already divide their data are returned as they are."""
    if isinstance(loader.dataset, IterableDataset):
        return loader
    own_batches = loader.batch_size is None and loader.batch_sampler is not None
    original: Any = loader.batch_sampler if own_batches else loader.sampler
    if isinstance(getattr(original, "sampler", original), DistributedSampler):
        return loader
    shuffles, rows = type(original) is RandomSampler and not original.replacement, len(loader.dataset)  # type: ignore[arg-type]
    if not (shuffles or type(original) is SequentialSampler) or len(original) != rows:
        raise ConfigError(
            f"the loader has a custom sampler ({type(original).__name__}), which raysgd cannot divide among "
            f"{rank_info.world_size} workers: pass add_dist_sampler=False and divide it yourself, or omit the sampler"
        )
    sampler: DistributedSampler[Any] = DistributedSampler(
        loader.dataset,
        num_replicas=rank_info.world_size,
        rank=rank_info.world_rank,
        shuffle=shuffles,
        drop_last=loader.drop_last,
    )
    size = loader.batch_size  # None: each item is a batch
    batches = None if size is None else torch.utils.data.BatchSampler(sampler, size, loader.drop_last)
    return loader_with(loader, sampler=sampler, batch_sampler=batches)


class PreparedLoader:
    """A loader whose batches are on the device. Each pass of a `DistributedSampler` has another
    order, even without calls of `set_epoch`, also if the function continues from a checkpoint or a
    commit: the numbers of the passes are those of the run. Any other order, such as that of a
    single worker, is torch's own. If one of the loader's processes fails, the function runs again.
    """

    def __init__(
        self, loader: DataLoader[Any], device: torch.device | None, session: Session, *, ahead: bool = False
    ) -> None:
        """With `ahead`, a batch is sent to a GPU while the one before is used."""
        sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
        self.loader, self._sampler = loader, sampler if isinstance(sampler, DistributedSampler) else None
        self._carrier = Carrier() if device is None else make_carrier(device, channels_last=False, ahead=ahead)
        self._passes, self._name = dict[str, int](), ""
        if self._sampler is not None and self._sampler.shuffle:
            session.loaders.append(len(sampler.dataset))
            self._name = f"{session.loaders[-1]} rows, {session.loaders.count(session.loaders[-1])}"
            self._passes = session.passes
        self._next_pass = self._passes.get(self._name, 0)
        self._epoch_set = getattr(sampler, "epoch", 0) if self._next_pass else 0  # by this class, in the sampler

    def __iter__(self) -> Iterator[Any]:
        sampler, ahead, sent = self._sampler, self._carrier.ahead, deque[Any]()
        if sampler is not None:
            if sampler.epoch == self._epoch_set:  # otherwise, the function has set another one
                sampler.set_epoch(self._next_pass)
            self._next_pass = self._epoch_set = sampler.epoch
        self._passes[self._name], self._next_pass = self._next_pass, self._next_pass + 1
        batches = itertools.chain(LoaderIterator(self.loader), [END] * ahead)
        last = length_hint(self.loader) if self._name else 0  # 0: the user's batch sampler has no length
        try:
            for number, batch in enumerate(batches, start=1 - ahead):
                if batch is not END:
                    sent.append(self._carrier.send(batch))
                if number == last:  # a loop that counts its batches never asks for the end
                    self._passes[self._name] = self._next_pass
                if number > 0:
                    yield self._carrier.arrived(sent.popleft())
        finally:
            self._passes[self._name] = self._next_pass

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        """Read an attribute of the user's loader, such as `dataset` or `sampler`."""
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


class ElasticLoader:
    """Owns an epoch's order, and how many of its samples the loop has received. It is part of
    `train.elastic`'s state: after a change of workers, the rest of the epoch is divided among the
    new ranks, and each sample is used exactly once."""

    def __init__(self, loader: DataLoader[Any], rank_info: RankInfo, device: torch.device | None) -> None:
        if not is_planned(loader):
            raise ConfigError(f"elastic_data_loader takes a DataLoader of a map-style dataset, got {loader!r}")
        self._source = PlannedSource(loader, pad=True, device=device)
        self._rank_info, self._device = rank_info, device
        self.epochs_begun = 0
        self._offset = 0
        self._open = False
        self._seed: int | None = None  # of the default generator in an earlier attempt
        self._loads = 0  # of a state, which ends the batches of a loop
        # Whether the loop has all batches of the epoch: if it counts them, it never asks for the end.
        self._has_all = False
        self._asks = False  # whether a loop has yet to learn how many batches a restored epoch has left

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the rest of the epoch that is open, or a new epoch."""
        return self._read_batches(self._continue_epoch(), self._loads)

    def _continue_epoch(self) -> Iterator[Drawn]:
        if not self._open or self._has_all:
            self._begin_epoch()
            self._offset, self._open, self._has_all = 0, True, False
        self._has_all = not self._count_left()
        return self._source.batches(self._rank_info, self._offset)

    def _begin_epoch(self) -> None:
        """Draw the order of a new epoch. A generator with the seed of an earlier attempt would draw
        those of the first epochs once more."""
        seeded = self._seed == torch.initial_seed()
        with torch.random.fork_rng(devices=[], enabled=seeded):
            if seeded:
                torch.default_generator.manual_seed(derived_seed(torch.initial_seed(), self.epochs_begun))
            self._source.begin(self.epochs_begun, self._rank_info, self._rank_info.world_size > 1)
        self.epochs_begun += 1

    def _read_batches(self, batches: Iterator[Drawn], loads: int) -> Iterator[Any]:
        while True:
            for drawn in batches:
                self._offset = drawn.offset
                self._has_all, self._asks = not self._count_left(), False
                yield drawn.batch if self._device is None else move(drawn.batch, self._device)
            if loads == self._loads:
                break
            batches, loads = self._continue_epoch(), self._loads  # from the position that the loop has restored
        self._open = False

    def __len__(self) -> int:
        """How many batches each rank has left of the open epoch, or those of a new one."""
        loader, workers = self._source.loader, self._rank_info.world_size
        asks, self._asks = self._asks, False
        if self._open and (asks or not self._has_all):
            return self._count_left()
        new = batches_per_epoch(loader, workers, divided=True)
        return len(loader) if new is None else new

    @property
    def _is_needed(self) -> bool:
        """Whether a commit without it, now, would repeat samples or their orders."""
        shuffles = type(self._source.loader.sampler) is not SequentialSampler
        return (self._open and not self._has_all) or (self.epochs_begun > 0 and shuffles)

    def _count_left(self) -> int:
        return self._source.steps_left(self._rank_info, self._offset)

    def close(self) -> None:
        """End the loader's processes."""
        self._source.close()

    def state_dict(self) -> dict[str, Any]:
        position = {"epochs_begun": self.epochs_begun, "offset": self._offset, "open": self._open}
        seed = torch.initial_seed() if self._seed is None else self._seed
        return {**position, "seed": seed, "source": self._source.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not self.epochs_begun and state["epochs_begun"]:
            self._seed = state.get("seed")
        self.epochs_begun, self._offset, self._open = state["epochs_begun"], state["offset"], state["open"]
        self._has_all, self._asks = False, True
        self._loads += 1
        self._source.load(state["source"])


class Watch:
    """Notices with what a function trains after `train.elastic`, so that a commit can refuse to be
    incomplete. `parts` are the objects in its state."""

    def __init__(self, session: Session, parts: Mapping[str, Any]) -> None:
        self._prepared, self._parts, self._checked = session.prepared, parts, False
        self._stepped, self._moved = WeakSet[Any](), set[int]()  # optimizers; the weights that they own
        self._hook = register_optimizer_step_post_hook(self._note_step)
        session.at_end.callback(self._hook.remove)

    def _note_step(self, optimizer: Any, *_: Any) -> None:
        if optimizer not in self._stepped:
            self._stepped.add(optimizer)
            weights = self._weights_of(optimizer)
            self._moved, self._checked = self._moved | weights, self._checked and not weights

    def _weights(self) -> set[int]:
        modules = [each for each in (*self._parts.values(), *self._prepared) if isinstance(each, nn.Module)]
        return {id(each) for module in modules for each in module.parameters() if each.requires_grad}

    def _weights_of(self, optimizer: Any) -> set[int]:
        return self._weights() & {id(each) for group in optimizer.param_groups for each in group["params"]}

    def check(self) -> None:
        """Raise ConfigError for what no part has: at the first commit, and when another optimizer
        has moved a weight. A part has its attributes, and what its `state_dict` has the tensors of.
        An optimizer that is gone is not needed."""
        if self._checked:
            return
        parts = self._parts.values()
        owners = [vars(part) for part in parts if hasattr(part, "__dict__") and not hasattr(part, "get_last_lr")]
        ids = {id(each) for each in (*parts, *leaves(owners))}  # a scheduler's optimizer is not in its state
        if missing := [each for each in self._needed() if id(each[1]) not in ids]:
            saved = {each.data_ptr() for each in _tensors_in([part.state_dict() for part in parts])}
            absent = [
                name
                for name, _, tensors in missing
                if not tensors or not saved.issuperset(t.data_ptr() for t in tensors)
            ]
            if lacks := {f'"{name}": {name}': name for name in absent}:
                raise ConfigError(LACKS % (" and the ".join(lacks.values()), ", ".join(lacks)))
        self._checked = True
        if self._moved == self._weights():
            self._hook.remove()

    def _needed(self) -> Iterator[tuple[str, Any, list[Any]]]:
        for each in self._stepped:
            tensors = _tensors_in(each.state)
            if self._weights_of(each) and (
                tensors or "initial_lr" in each.param_groups[0]
            ):  # which a scheduler changes
                yield "optimizer", each, tensors
        for each in self._prepared:
            if isinstance(each, ElasticLoader):
                if each._is_needed:
                    yield "loader", each, []
            elif trained := [weight for weight in each.parameters() if id(weight) in self._moved]:
                yield "model", each, trained


def _tensors_in(content: Any) -> list[torch.Tensor]:
    return [each for each in leaves(content) if isinstance(each, torch.Tensor)]
