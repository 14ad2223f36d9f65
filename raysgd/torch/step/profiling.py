"""The Torch profiler in a worker, around some batches of the first calls of `train`. Worker."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from raysgd.callbacks.torch_profiler import ProfilerSettings
from raysgd.replica.steps.feed import Feed
from raysgd.replica.steps.step import Step
from raysgd.replica.steps.step_policy import Policy


class TraceKeeper:
    """Owns the traces that were recorded and not reported yet."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._traces: dict[str, bytes] = {}

    def keep(self, profiler: Any, also_in: Path | None = None) -> None:
        """Keep the profiler's trace. This is an `on_trace_ready` of `torch.profiler.profile`.
        `also_in` is a directory on this machine for another copy."""
        with tempfile.TemporaryDirectory(prefix="raysgd-trace-") as folder:
            path = Path(folder) / f"rank{self.rank}.{time.time_ns() // 1_000_000}.pt.trace.json"
            profiler.export_chrome_trace(str(path))
            self._traces[path.name] = path.read_bytes()
        if also_in is not None:
            also_in.mkdir(parents=True, exist_ok=True)
            (also_in / path.name).write_bytes(self._traces[path.name])

    def taken(self) -> dict[str, bytes]:
        traces, self._traces = self._traces, {}
        return traces


class Profiler(TraceKeeper, Policy):
    """Observes the steps of `train`. Owns the profiler while it runs."""

    def __init__(self, wanted: ProfilerSettings) -> None:
        super().__init__(rank=0)
        self._wanted, self._calls = wanted, set[int]()
        self._profile: Any = None

    @classmethod
    def for_run(cls, run: Any) -> Any:
        return run.profiler

    def begin_loop(self, feed: Feed) -> None:
        """Record the epoch if this rank is to be recorded, in one of the first calls."""
        wanted, self.rank = self._wanted, feed.rank_info.world_rank
        self._calls.add(feed.position.call)
        if len(self._calls) <= wanted.calls and (wanted.ranks is None or self.rank in wanted.ranks):
            batches = torch.profiler.schedule(wait=wanted.wait, warmup=wanted.warmup, active=wanted.active, repeat=1)
            profile = torch.profiler.profile(schedule=batches, on_trace_ready=self.keep, **wanted.arguments)
            self._profile = profile
            profile.start()

    def end_step(self, step: Step) -> None:
        if self._profile is not None and step.committed:
            self._profile.step()

    def reset(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            self._profile = None
