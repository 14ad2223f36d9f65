"""Report the progress of training on Ray's metrics endpoint. Driver."""

from __future__ import annotations

import threading
import time
from typing import Any

import ray
from ray.util.metrics import Gauge

from raysgd.callbacks.base import Callback, CallResult, Run, Underway
from raysgd.core.policy import Recovery
from raysgd.errors import ConfigError

__all__ = ["RayMetricsCallback"]

REPEAT_S = 1.0
GAUGES = {
    "raysgd_samples_per_second": "Samples that all workers together train on, per second",
    "raysgd_step_seconds": "Seconds per batch (for a training function: per report)",
    "raysgd_world_size": "Workers that train",
    "raysgd_recoveries": "Recoveries so far: failures, growth, preemptions",
}


class RayMetricsCallback(Callback):
    """Sets gauges on Ray's metrics endpoint for Prometheus, with the label `trainer` (the operator's or the function's
    name, unless `name` is given): samples per second, seconds per step, the world size, and the number of recoveries.
    They are updated while an epoch runs, and exist until the trainer is shut down.

    Owns a thread that sets them again every second, because Ray drops a gauge that is not set for a while.

    Needs a trainer on Ray, and Ray with its metrics agent (`pip install 'raysgd[metrics]'`).
    """

    def __init__(self, name: str | None = None) -> None:
        self._given = name
        self._gauges: dict[str, Any] = {}
        self._values: dict[str, float] = {}
        self._ended: threading.Event | None = None
        self._recoveries = 0
        self._began = 0.0
        self._samples: dict[str, float] = {}

    def on_start(self, run: Run) -> None:
        self.on_end(False)
        if not ray.is_initialized():
            raise ConfigError("RayMetricsCallback needs Ray, and this trainer runs without it: pass use_ray=True")
        tags = {"trainer": self._given or run.name or run.trainer}
        for name, description in GAUGES.items():
            self._gauges[name] = Gauge(name, description=description, tag_keys=("trainer",))
            self._gauges[name].set_default_tags(tags)
        self._set(world_size=run.num_workers, recoveries=self._recoveries)
        self._ended = threading.Event()
        threading.Thread(target=self._repeat, args=(self._ended,), name="raysgd-gauges", daemon=True).start()

    def on_progress(self, now: Underway) -> None:
        if not now.worker:
            self._began, self._samples = time.monotonic(), {}
        elif now.kind == "train" and now.progress.batches:
            seconds = max(time.monotonic() - self._began, 1e-6)
            self._samples[now.worker] = float(now.metrics.get("num_samples") or 0.0)
            self._set(
                samples_per_second=max(self._samples.values()) * len(self._samples) / seconds,
                step_seconds=seconds / now.progress.batches,
            )

    def on_result(self, result: CallResult) -> None:
        self._set(world_size=result.world_size)
        metrics, seconds = result.metrics, max(result.seconds, 1e-6)
        if result.kind == "report":
            self._set(step_seconds=seconds)
        elif result.kind == "train":
            self._set(samples_per_second=float(metrics.get("num_samples") or 0) / seconds)
            self._set(step_seconds=seconds / max(float(metrics.get("batch_count") or 1), 1.0))

    def on_recovery(self, recovery: Recovery) -> None:
        self._recoveries += 1
        self._set(world_size=recovery.world_size_after, recoveries=self._recoveries)

    def on_end(self, failed: bool) -> None:
        if self._ended is not None:
            self._ended.set()

    def _set(self, **values: float) -> None:
        self._values |= {f"raysgd_{name}": float(value) for name, value in values.items()}
        self._set_gauges()

    def _set_gauges(self) -> None:
        for name, value in list(self._values.items()):
            gauge = self._gauges.get(name)
            if gauge is not None:
                gauge.set(value)

    def _repeat(self, ended: threading.Event) -> None:
        while not ended.wait(REPEAT_S) and ray.is_initialized():
            self._set_gauges()
