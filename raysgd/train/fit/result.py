"""The result of `fit()`: the last metrics, the checkpoints, and where they are stored. Driver."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from raysgd.callbacks.writers import import_extra
from raysgd.config import one_of
from raysgd.core.measures.metrics import cost
from raysgd.errors import TrainingFailedError
from raysgd.storage.locations import Place, place, text_of
from raysgd.storage.masking import mask
from raysgd.storage.remote import Uri
from raysgd.train.checkpoint import Checkpoint
from raysgd.train.fit.records import StoredRun
from raysgd.train.run.checkpoint_manager import CheckpointManager


@dataclass(frozen=True, kw_only=True)
class Result:
    """What `fit()` returns.

    metrics           the last report of rank 0, with what raysgd adds to every report
    checkpoint        the newest checkpoint, or None
    best_checkpoints  the stored checkpoints with the metrics of each: (checkpoint, metrics), oldest
                      first
    error             the error that ended the run, if `Result.from_path` read it back; `fit()`
                      raises it
    path              where the run is stored. A URI includes its password, which `repr` masks with
                      `***`
    log_dir           the run's directory on this machine, where callbacks write
    history           every report of rank 0
    return_values     what the function returned on each rank
    """

    metrics: dict[str, Any] = field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    best_checkpoints: Sequence[tuple[Checkpoint, dict[str, Any]]] = ()
    error: BaseException | None = None
    path: str = field(default="", repr=False)
    log_dir: Path = Path()
    history: Sequence[dict[str, Any]] = field(default=(), repr=False)
    return_values: Sequence[Any] = field(default=(), repr=False)

    @classmethod
    def from_path(cls, path: str | Path | Uri, *, trusted: bool = False) -> Result:
        """Read the result of the run of `fit()` at `path` so far, from its files. This runs no code
        from them. `trusted` applies to its checkpoints."""
        where = place(path)
        past = StoredRun.read(where)
        manager = CheckpointManager(where)
        manager.adopt(past.metrics_by_checkpoint(), resume=False)
        log_dir = where if isinstance(where, Path) else Path()
        error = TrainingFailedError(past.error) if past.status == "failed" else None
        return cls.of(where, manager, past.rows, trusted=trusted, log_dir=log_dir, error=error)

    @classmethod
    def of(
        cls,
        where: Place,
        manager: CheckpointManager,
        rows: Sequence[dict[str, Any]],
        *,
        trusted: bool = True,
        **more: Any,
    ) -> Result:
        """Make the result of a run with these rows and this manager's checkpoints."""
        stored = sorted(manager.stored, key=lambda each: each.number)
        if stored and (stored[-1].number == manager.latest_id or manager.payload is None):
            newest: Checkpoint | None = Checkpoint(stored[-1].path, trusted=trusted)
        else:
            newest = manager.latest
        return cls(
            metrics=dict(rows[-1]) if rows else {},
            checkpoint=newest,
            best_checkpoints=[(Checkpoint(each.path, trusted=trusted), dict(each.metrics)) for each in stored],
            path=text_of(where),
            history=rows,
            **more,
        )

    def __repr__(self) -> str:
        shown = {each.name: getattr(self, each.name) for each in fields(self) if each.repr} | {"path": mask(self.path)}
        return f"Result({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def metrics_dataframe(self) -> Any:
        """A pandas.DataFrame with one row for each report of rank 0."""
        return import_extra("pandas", user="metrics_dataframe").DataFrame(list(self.history))

    @property
    def config(self) -> dict[str, Any] | None:
        """The function's config."""
        return self.metrics.get("config")

    @property
    def return_value(self) -> Any:
        """What the function returned on rank 0."""
        return self.return_values[0] if self.return_values else None

    def get_best_checkpoint(self, metric: str, mode: Literal["min", "max"]) -> Checkpoint | None:
        """Find the stored checkpoint with the best `metric`; `mode` is "min" or "max"."""
        one_of("mode", mode, "min", "max")
        scored = [
            (cost(value, mode), -number)  # of equal ones, the newest
            for number, (_, metrics) in enumerate(self.best_checkpoints)
            if not math.isnan(value := float(metrics.get(metric, math.nan)))
        ]
        return self.best_checkpoints[-min(scored)[1]][0] if scored else None
