"""From what an operator registered, or a call was given, to a source of batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from raysgd.constants import BATCH_SIZE
from raysgd.core.progress import Control
from raysgd.ray_data.columns import RayData
from raysgd.torch.data.sampling import is_planned, unit_size
from raysgd.torch.data.sources import LiveSource, PlannedSource, RowSource, Source, StreamSource
from raysgd.torch.operator import TrainingOperator
from raysgd.torch.settings import TorchSettings
from raysgd.training.position import Position

__all__ = ["Opener"]


@dataclass(frozen=True)
class Opener:
    """Owns the names of the Ray Datasets that were registered here."""

    operator: TrainingOperator
    settings: TorchSettings
    control: Control
    _seen: list[tuple[str, Any]] = field(default_factory=list)

    def registered(self, loader: Any, position: Position, *, training: bool) -> Source:
        if RayData.is_given_as(loader):
            assert self.settings.rows is not None
            data = RayData.of(loader)
            rows = self.settings.rows(self._name(loader, training), data.dataset, self.control.deliver)
            return self._by_rows(loader, rows, data, position, training=training, own_call=False)
        settings = self.settings
        shared = settings.distributed and settings.add_dist_sampler
        if is_planned(loader) and (shared or not settings.distributed):
            whole = unit_size(loader) * settings.num_workers if settings.batch == "global" else None
            return PlannedSource(loader, pad=training, global_batch=whole if training else None)
        return LiveSource(loader, shard=shared, together=training, keep=self._keep)

    def for_a_call(self, dataset: Any, position: Position) -> Source:
        """What `train(dataset=...)` was given: of a Ray Dataset the way to its rows, which the driver has opened."""
        if not isinstance(dataset, RayData):
            position.set_aside()
            return StreamSource(dataset)
        position.set_aside(restart=True)
        return self._by_rows(dataset, dataset.dataset, dataset, position, training=True, own_call=True)

    def _by_rows(
        self, loader: Any, rows: Any, data: RayData, position: Position, *, training: bool, own_call: bool
    ) -> RowSource:
        data = data.sized(self.operator.config, BATCH_SIZE)
        whole = (data.batch_size or 1) * self.settings.num_workers
        step = whole if training and self.settings.batch == "global" else None
        return RowSource(loader, rows, data, position, own_call=own_call, pad=training, step=step, keep=self._keep)

    def _name(self, loader: Any, training: bool) -> str:
        """The same on all ranks, as these register the same data sets in the same order."""
        kind = "train" if training else "validation"
        if not any(each is loader for _, each in self._seen):
            number = sum(name.startswith(kind) for name, _ in self._seen)
            self._seen.append((f"{kind}-{number}", loader))
        return next(name for name, each in self._seen if each is loader)

    @property
    def _keep(self) -> int:
        """How many batches a window and the batch drawn ahead may hold uncommitted."""
        return self.settings.options.accumulate + 1
