"""The Torch profiler in a training function."""

from __future__ import annotations

from typing import Any

from raysgd.torch.traces import TraceKeeper
from raysgd.train.run_session import current

__all__ = ["TorchWorkerProfiler"]


class TorchWorkerProfiler:
    """Takes what a `torch.profiler.profile` of yours records, to go along with a report.

        profiler = train.torch.TorchWorkerProfiler()
        with torch.profiler.profile(schedule=..., on_trace_ready=profiler.trace_handler) as profile:
            ...
            profile.step()
        train.report(loss=loss, **profiler.get_and_clear_profile_traces())

    `TorchTensorboardProfilerCallback` writes the traces on the driver; nobody else gets to see them.
    """

    def __init__(self) -> None:
        self._traces = TraceKeeper(current("torch.TorchWorkerProfiler").rank_info.world_rank)

    def trace_handler(self, profiler: Any) -> None:
        """An `on_trace_ready`."""
        self._traces.keep(profiler)

    def get_and_clear_profile_traces(self) -> dict[str, Any]:
        """What was recorded since the last time, as an argument of `train.report`."""
        return self._traces.taken()
