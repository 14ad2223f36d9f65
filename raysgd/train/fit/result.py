"""What a run of a function trainer leaves: its last metrics, its checkpoints, and where everything is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from raysgd.errors import ConfigError, TrainingFailedError
from raysgd.storage.locations import Place, Uri, place, text_of
from raysgd.storage.masking import mask
from raysgd.train.checkpoint import Checkpoint
from raysgd.train.checkpoint_manager import CheckpointKeeper
from raysgd.train.fit.records import Past

__all__ = ["Result"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """What `fit()` returns.

    metrics           the last report of rank 0, with what every report is given beside its own values
    checkpoint        the newest one; None if there was none
    best_checkpoints  those that were kept, with what was reported beside each: (checkpoint, metrics), oldest first
    error             what ended the run, when it is read back with `Result.from_path`; `fit()` raises it
    path              where the run is stored: the URI as it was given, with any password in it (`repr` shows `***`)
    log_dir           its directory on this machine, where callbacks write
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
        """What a run of `fit()` has left so far, read back. That runs no code from there; `trusted` is what its
        checkpoints are then read with."""
        where = place(path)
        past = Past.read(where)
        keeper = CheckpointKeeper(where)
        keeper.adopt(past.reported_with(), to_go_on=False)
        log_dir = where if isinstance(where, Path) else Path()
        error = TrainingFailedError(past.error) if past.status == "failed" else None
        return cls.made(where, keeper, past.rows, trusted=trusted, log_dir=log_dir, error=error)

    @classmethod
    def made(
        cls,
        where: Place,
        keeper: CheckpointKeeper,
        rows: Sequence[dict[str, Any]],
        *,
        trusted: bool = True,
        **more: Any,
    ) -> Result:
        kept = sorted(keeper.kept, key=lambda each: each.number)
        if kept and (kept[-1].number == keeper.latest_id or keeper.payload is None):
            newest: Checkpoint | None = Checkpoint(kept[-1].path, trusted=trusted)
        else:
            newest = keeper.latest
        return cls(
            metrics=dict(rows[-1]) if rows else {},
            checkpoint=newest,
            best_checkpoints=[(Checkpoint(each.path, trusted=trusted), dict(each.metrics)) for each in kept],
            path=text_of(where),
            history=rows,
            **more,
        )

    def __repr__(self) -> str:
        shown = {each.name: getattr(self, each.name) for each in fields(self) if each.repr} | {"path": mask(self.path)}
        return f"Result({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    @property
    def metrics_dataframe(self) -> Any:
        """Every report of rank 0, as a row of a pandas.DataFrame."""
        try:
            pandas = import_module("pandas")
        except ImportError as error:
            raise ImportError("metrics_dataframe needs pandas: pip install pandas") from error
        return pandas.DataFrame(list(self.history))

    @property
    def config(self) -> dict[str, Any] | None:
        """What the function was given."""
        return self.metrics.get("config")

    @property
    def return_value(self) -> Any:
        """Rank 0's."""
        return self.return_values[0] if self.return_values else None

    def get_best_checkpoint(self, metric: str, mode: Literal["min", "max"]) -> Checkpoint | None:
        """Of those that were kept, the one with the best value of a reported metric."""
        if mode not in ("min", "max"):
            raise ConfigError(f"mode must be 'min' or 'max', got {mode!r}")
        sign = 1 if mode == "max" else -1
        scored = [
            (sign * float(metrics[metric]), number)
            for number, (_, metrics) in enumerate(self.best_checkpoints)
            if metric in metrics and not math.isnan(float(metrics[metric]))
        ]
        return self.best_checkpoints[max(scored)[1]][0] if scored else None
