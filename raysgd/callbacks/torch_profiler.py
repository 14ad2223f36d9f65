"""Store the workers' Torch profiler traces in the log folder, for TensorBoard. Driver."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raysgd.callbacks.base import Callback, CallResult, Run
from raysgd.callbacks.writers import check_ranks
from raysgd.config import at_least


@dataclass(frozen=True, kw_only=True)
class ProfilerSettings:
    """What each worker of these `ranks` (None: all) profiles, in its first `calls` calls of
    `train`: it skips `wait` batches, runs the profiler for `warmup` batches without recording, and
    then records `active` batches. `arguments` are further arguments of `torch.profiler.profile`."""

    ranks: tuple[int, ...] | None = None
    wait: int = 1
    warmup: int = 1
    active: int = 3
    calls: int = 1
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in {"wait": 0, "warmup": 0, "active": 1, "calls": 1}.items():
            at_least(name, getattr(self, name), least, whole=True)


class TorchProfilerCallback(Callback):
    """Writes `pytorch_profiler/rank0.<time>.pt.trace.json`, for each rank in `workers_to_log`
    (None: all of them), in `logdir`, by default the log folder.

        TorchTrainer(..., callbacks=[TorchProfilerCallback(workers_to_log=0, active=5)])

    The workers of a TorchTrainer profile some batches of the first call of `train`
    (`ProfilerSettings` has the other arguments). A training function runs its own profiler, and
    reports the traces of its `TorchWorkerProfiler`.
    """

    def __init__(
        self,
        logdir: str | Path | None = None,
        workers_to_log: int | Iterable[int] | None = None,
        **settings: Any,
    ) -> None:
        self._workers = check_ranks(workers_to_log)
        self.on_workers = ProfilerSettings(ranks=self._workers, **settings)
        self._user_folder = None if logdir is None else Path(logdir).expanduser()
        self.folder: Path | None = self._user_folder

    def on_start(self, run: Run) -> None:
        self.folder = self._user_folder or run.folder / "pytorch_profiler"

    def on_result(self, result: CallResult) -> None:
        if self.folder is None:
            return
        # The workers of a TorchTrainer select the ranks themselves, because they run the profiler.
        every_rank = result.kind != "report" or self._workers is None
        for rank, traces in enumerate(result.traces):
            for name, trace in traces.items() if every_rank or rank in (self._workers or ()) else ():
                self.folder.mkdir(parents=True, exist_ok=True)
                (self.folder / name).write_bytes(trace)

    @property
    def written(self) -> list[Path]:
        """The trace files, oldest first."""
        return sorted(self.folder.glob("*.pt.trace.json")) if self.folder is not None else []
