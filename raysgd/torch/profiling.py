"""The Torch profiler in a worker, around some batches of the first calls of `train`. Worker."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from raysgd.callbacks.base import TRACES
from raysgd.callbacks.torch_profiler import ProfilerSettings
from raysgd.core.progress import Control
from raysgd.core.ranks import RankInfo
from raysgd.torch.operator import TrainingOperator
from raysgd.torch.replica import TorchReplica, TorchReplicaFactory
from raysgd.torch.settings import TorchSettings

__all__ = ["ProfiledReplica", "ProfiledReplicaFactory", "TraceKeeper"]


class TraceKeeper:
    """Owns the traces that were recorded and not reported yet."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._traces: dict[str, bytes] = {}

    def keep(self, profiler: Any, also_in: Path | None = None) -> None:
        """Keep the profiler's trace. This is an `on_trace_ready` of `torch.profiler.profile`. `also_in` is a directory on
        this machine for another copy."""
        with tempfile.TemporaryDirectory(prefix="raysgd-trace-") as folder:
            path = Path(folder) / f"rank{self.rank}.{time.time_ns() // 1_000_000}.pt.trace.json"
            profiler.export_chrome_trace(str(path))
            self._traces[path.name] = path.read_bytes()
        if also_in is not None:
            also_in.mkdir(parents=True, exist_ok=True)
            (also_in / path.name).write_bytes(self._traces[path.name])

    def taken(self) -> dict[str, Any]:
        """Return the part of a report that holds the new traces."""
        traces, self._traces = self._traces, {}
        return {TRACES: traces} if traces else {}


class ProfiledReplica(TorchReplica):
    """A replica that records some batches of its first calls of `train`."""

    def __init__(
        self,
        operator: TrainingOperator,
        settings: TorchSettings,
        rank_info: RankInfo,
        control: Control,
        wanted: ProfilerSettings,
    ) -> None:
        super().__init__(operator, settings, rank_info, control)
        self._wanted, self._traces = wanted, TraceKeeper(rank_info.world_rank)
        self._profiler: Any = None
        self._calls: set[int] = set()

    @contextmanager
    def _measuring_epoch(self) -> Iterator[None]:
        with self._recording(), super()._measuring_epoch():
            yield

    @contextmanager
    def _recording(self) -> Iterator[None]:
        wanted = self._wanted
        self._calls.add(self._position.call)
        if len(self._calls) > wanted.calls or (wanted.ranks is not None and self.rank not in wanted.ranks):
            yield
            return
        self._traces.rank = self.rank
        with torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=wanted.wait, warmup=wanted.warmup, active=wanted.active, repeat=1),
            on_trace_ready=self._traces.keep,
            **wanted.arguments,
        ) as self._profiler:
            try:
                yield
            finally:
                self._profiler = None

    def _on_commit(self, last: bool = False) -> None:
        super()._on_commit(last)
        if self._profiler is not None:
            self._profiler.step()

    def _reported(self, *arguments: Any) -> dict[str, Any]:
        return {**super()._reported(*arguments), **self._traces.taken()}


class ProfiledReplicaFactory(TorchReplicaFactory):
    """Makes replicas that are profiled."""

    def __init__(
        self,
        operator_cls: type[TrainingOperator],
        config: dict[str, Any],
        settings: TorchSettings,
        wanted: ProfilerSettings,
    ) -> None:
        super().__init__(operator_cls, config, settings)
        self.wanted = wanted

    def _replica(self, operator: TrainingOperator, rank_info: RankInfo, control: Control) -> TorchReplica:
        return ProfiledReplica(operator, self.settings, rank_info, control, self.wanted)
