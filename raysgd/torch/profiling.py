"""The Torch profiler in a worker, around some batches of a call of the trainer's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from raysgd.callbacks.torch_profiler import ProfilerSettings
from raysgd.core.progress import Control
from raysgd.core.ranks import RankInfo
from raysgd.torch.operator import TrainingOperator
from raysgd.torch.replica import TorchReplica, TorchReplicaFactory
from raysgd.torch.settings import TorchSettings
from raysgd.torch.traces import TraceKeeper

__all__ = ["ProfiledReplica", "ProfiledReplicaFactory"]


class ProfiledReplica(TorchReplica):
    """A replica that records some batches of its first calls of `train`."""

    def __init__(
        self,
        operator: TrainingOperator,
        settings: TorchSettings,
        rank_info: RankInfo,
        control: Control,
        profiler: ProfilerSettings,
    ) -> None:
        super().__init__(operator, settings, rank_info, control)
        self._wanted, self._traces = profiler, TraceKeeper(rank_info.world_rank)
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
        self, operator_cls: type[TrainingOperator], config: dict[str, Any], settings: TorchSettings, wanted: Any
    ) -> None:
        super().__init__(operator_cls, config, settings)
        self.wanted: ProfilerSettings = wanted

    def _replica(self, operator: TrainingOperator, rank_info: RankInfo, control: Control) -> TorchReplica:
        return ProfiledReplica(operator, self.settings, rank_info, control, self.wanted)
