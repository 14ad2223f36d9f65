"""How training goes, on Ray's own metrics endpoint."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.util.metrics import Gauge

from raysgd.callbacks.base import Callback, Result, Run, Underway
from raysgd.elastic import Recovery
from raysgd.errors import ConfigError

__all__ = ["RayMetricsCallback"]

GAUGES = {
    "raysgd_samples_per_second": "Samples that all workers together train on, per second",
    "raysgd_step_seconds": "Seconds per batch (of a training function: per report)",
    "raysgd_world_size": "Workers that train",
    "raysgd_recoveries": "Changes of the workers so far: losses, growth, preemptions",
}


class RayMetricsCallback(Callback):
    """Sets gauges that Ray's metrics endpoint shows for Prometheus, with the label `trainer` (the operator's or the
    function's name, unless `name` is given): samples per second, seconds per step, the world size, and the number of
    recoveries. They are renewed while an epoch runs.

    Needs a trainer on Ray, and Ray with its metrics agent (`pip install 'raysgd[metrics]'`).
    """

    def __init__(self, name: str | None = None) -> None:
        self._given = name
        self._gauges: dict[str, Any] = {}
        self._recoveries = 0
        self._began = 0.0
        self._samples: dict[str, float] = {}

    def on_start(self, run: Run) -> None:
        if not ray.is_initialized():
            raise ConfigError("RayMetricsCallback needs Ray, and this trainer runs without it: pass use_ray=True")
        tags = {"trainer": self._given or run.name or run.trainer}
        for name, description in GAUGES.items():
            self._gauges[name] = Gauge(name, description=description, tag_keys=("trainer",))
            self._gauges[name].set_default_tags(tags)
        self._set(world_size=run.num_workers, recoveries=self._recoveries)

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

    def on_result(self, result: Result) -> None:
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

    def _set(self, **values: float) -> None:
        for name, value in values.items():
            gauge = self._gauges.get(f"raysgd_{name}")
            if gauge is not None:
                gauge.set(float(value))
