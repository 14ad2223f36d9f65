"""One run of a training function, put together but not begun: `fit()` begins it here, Tune in a trial."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from raysgd.train.checkpoint_manager import CheckpointKeeper
from raysgd.train.executor import BackendExecutor
from raysgd.train.fit.checkpoint_strategy import CheckpointConfig
from raysgd.train.run import RunOptions, payload_of
from raysgd.workers.serialization import dumps

__all__ = ["FunctionJob"]

BEFORE_FIRST = -1  # checkpoints of fit() and of trials are counted from 0


@dataclass(frozen=True, kw_only=True)
class FunctionJob:
    """`make` makes the executor, which is not started; `checkpoint` is what the function is given at first."""

    make: Callable[[], BackendExecutor]
    function: Callable[..., Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: Any = None
    checkpoint_config: CheckpointConfig | None = None
    options: RunOptions = field(default_factory=RunOptions)

    def keeper(self, directory: Any, *, newest: int | None = None) -> CheckpointKeeper:
        """Of the run's checkpoints; they lie in its directory. `newest`: how far an earlier run has counted."""
        return CheckpointKeeper(
            directory,
            self.checkpoint_config,
            latest_id=BEFORE_FIRST if newest is None else newest,
            initial=payload_of(self.checkpoint, dumps),
        )

    def begin(
        self,
        executor: BackendExecutor,
        run_dir: Path,
        keeper: CheckpointKeeper,
        trial: Mapping[str, Any],
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        """On workers that stand; returns at once. `ready` is called right before the function begins."""
        options = replace(self.options, trial={**self.options.trial, **trial})
        executor.start_training(self.function, run_dir, config=self.config, options=options, keeper=keeper, ready=ready)
