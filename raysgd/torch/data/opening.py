"""Open a source of batches for what an operator registered, or what a call was given. Worker."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader, SequentialSampler

from raysgd.constants import BATCH_SIZE
from raysgd.core.control import Control
from raysgd.errors import ConfigError
from raysgd.ray_data.columns import RayData
from raysgd.replica.seeding import Places
from raysgd.replica.steps.position import Position
from raysgd.torch.data.sampling import has_own_batches, is_planned
from raysgd.torch.data.sources import BatchSource, LiveSource, PlannedSource, RowSource
from raysgd.torch.data.stateful import StatefulSource, has_state
from raysgd.torch.internals import TorchInternals
from raysgd.torch.operator import TrainingOperator
from raysgd.torch.settings import TorchSettings


@dataclass(frozen=True)
class Opener:
    """Opens a replica's sources. Owns the names of the registered Ray Datasets."""

    operator: TrainingOperator
    internals: TorchInternals
    control: Control
    _seen: list[tuple[str, Any]] = field(default_factory=list)

    def registered(self, loader: Any, position: Position, phase: str, places: Places | None = None) -> BatchSource:
        """Open a source for data that the operator registered. Reading it seeds for `places`."""
        training = phase == "train"
        if RayData.is_given_as(loader):
            assert self.internals.settings.rows is not None
            data = RayData.of(loader)
            rows = self.internals.settings.rows(self._name(loader, phase), data.dataset, self.control.deliver)
            return self._row_source(loader, rows, data, position, training=training, own_call=False)
        internals, settings = self.internals, self.internals.settings
        shared = settings.distributed and settings.add_dist_sampler
        if is_planned(loader) and (shared or not settings.distributed):
            if training and shared and self.operator.world_rank == 0:
                _warn_without_shuffling(loader)
            if training:
                _check_parts(loader, settings)
            division = internals.keep_batch.division if training else settings.evaluation
            more: dict[str, Any] = {"places": places, "position": position, "device": self.operator.device}
            return PlannedSource(loader, pad=training, division=division, **more)
        if training and has_state(loader):
            return StatefulSource(loader, shard=shared, keep=self._keep, places=places)
        return LiveSource(loader, shard=shared, together=training, keep=self._keep, places=places)

    def for_a_call(self, dataset: RayData, position: Position) -> BatchSource:
        """Open a source for `train(dataset=...)`: the driver sent a reader of the Ray Dataset."""
        position.set_aside()
        return self._row_source(dataset, dataset.dataset, dataset, position, training=True, own_call=True)

    def _row_source(
        self, loader: Any, rows: Any, data: RayData, position: Position, *, training: bool, own_call: bool
    ) -> RowSource:
        data = data.sized(self.operator.config, BATCH_SIZE)
        return RowSource(loader, rows, data, position, own_call=own_call, pad=training, keep=self._keep)

    def _name(self, loader: Any, kind: str) -> str:
        """A data set's name: all ranks register the same ones in the same order."""
        if not any(each is loader for _, each in self._seen):
            number = sum(name.startswith(kind) for name, _ in self._seen)
            self._seen.append((f"{kind}-{number}", loader))
        return next(name for name, each in self._seen if each is loader)

    @property
    def _keep(self) -> int:
        """How many batches a window and the prefetched batch may hold uncommitted."""
        return self.internals.settings.options.accumulate + 1


def _warn_without_shuffling(loader: DataLoader[Any]) -> None:
    """Warn, once per process, if data is trained on in its own order, which RaySGD shuffled."""
    if type(loader.sampler) is not SequentialSampler or has_own_batches(loader):
        return
    warnings.warn(
        "the training loader does not shuffle, so every epoch goes through the data in the same order. (ray.util.sgd shuffled it by "
        "itself on several workers.) Pass shuffle=True to the DataLoader in register_data(train_loader=...). Ignore this if the order "
        "matters, as where the operator keeps a state between batches",
        stacklevel=2,
    )


def _check_parts(loader: DataLoader[Any], settings: TorchSettings) -> None:
    """Raise ConfigError if the trainer's `parts` cannot be equal."""
    parts, workers = settings.parts, settings.num_workers
    if parts is None:
        return
    if loader.batch_size is None:
        raise ConfigError(
            f"parts={parts} divides a batch by rows, and this loader has a batch sampler or no batches: leave parts out, or make the "
            "loader with batch_size"
        )
    rows = loader.batch_size * workers
    if rows % parts:
        possible = ", ".join(str(each) for each in range(workers, rows + 1) if rows % each == 0)
        raise ConfigError(
            f"parts={parts} does not divide the {rows} rows of a batch (num_workers={workers} times batch_size={loader.batch_size}): pass "
            f"one of {possible}, or another batch_size"
        )
