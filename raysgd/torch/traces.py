"""Traces of the Torch profiler, on their way from a worker to the driver."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from raysgd.callbacks.base import TRACES

__all__ = ["TraceKeeper"]


class TraceKeeper:
    """Owns the traces that were made and not yet handed on. `keep` is an `on_trace_ready` of `torch.profiler.profile`."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._traces: dict[str, bytes] = {}

    def keep(self, profiler: Any) -> None:
        with tempfile.TemporaryDirectory(prefix="raysgd-trace-") as folder:
            path = Path(folder) / f"rank{self.rank}.{time.time_ns() // 1_000_000}.pt.trace.json"
            profiler.export_chrome_trace(str(path))
            self._traces[path.name] = path.read_bytes()

    def taken(self) -> dict[str, Any]:
        """To go with a report."""
        traces, self._traces = self._traces, {}
        return {TRACES: traces} if traces else {}
