"""Report the progress of training on Ray's metrics endpoint. Driver."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.util.metrics import Gauge

from raysgd.callbacks.base import Callback, CallResult, Run, Underway
from raysgd.callbacks.monitors import Throughput
from raysgd.constants import BATCH_COUNT, NUM_SAMPLES
from raysgd.core.metrics import SECONDS
from raysgd.core.policy import Recovery
from raysgd.core.speed import Speed
from raysgd.errors import ConfigError

REPEAT_S = 1.0
DATA = SECONDS["data"]
GAUGES = {
    "raysgd_samples_per_second": "Samples that all workers together train on, per second",
    "raysgd_step_seconds": "Seconds per batch (for a training function: per report)",
    "raysgd_data_seconds": "Seconds per batch in which a worker waits for data",
    "raysgd_waiting": "Seconds of each second in which the others wait for a slow worker, or all for data; 0 without a verdict",
    "raysgd_world_size": "Workers that train",
    "raysgd_target_workers": "Workers that the trainer was created with",
    "raysgd_recoveries": "Recoveries so far: failures, growth, preemptions",
    "raysgd_recovery_seconds": "Seconds that all recoveries so far took",
    "raysgd_checkpoint_age_seconds": "Seconds since the newest checkpoint was complete",
}


class RayMetricsCallback(Callback):
    """Sets gauges on Ray's metrics endpoint for Prometheus, with the label `trainer` (the
    operator's or the function's name, unless `name` is given): speed, workers, recoveries, and the
    age of the newest checkpoint (GAUGES). They are updated while an epoch runs, and exist until the
    trainer is shut down. An operator's workers measure how long they wait for data, which adds the
    seconds of `Throughput` to the results.

    Owns a thread that sets them again every second, because Ray drops a gauge that is not set for a
    while.

    Needs a trainer on Ray, and Ray with its metrics agent (`pip install 'raysgd[metrics]'`).
    """

    on_workers = Throughput.on_workers

    def __init__(self, name: str | None = None) -> None:
        self._given = name
        self._gauges: dict[str, Any] = {}
        self._values: dict[str, float] = {}
        self._ended: threading.Event | None = None
        self._saved_at: Callable[[], float | None] = lambda: None
        self._speed: Callable[[], Speed] = Speed
        self._recoveries, self._recovery_s = 0, 0.0
        self._began = 0.0
        self._workers: dict[str, Mapping[str, Any]] = {}

    def on_start(self, run: Run) -> None:
        self.on_end(False)
        if not ray.is_initialized():
            raise ConfigError("RayMetricsCallback needs Ray, and this trainer runs without it: pass use_ray=True")
        tags = {"trainer": self._given or run.name or run.trainer}
        for name, description in GAUGES.items():
            self._gauges[name] = Gauge(name, description=description, tag_keys=("trainer",))
            self._gauges[name].set_default_tags(tags)
        self._saved_at, self._speed = run.saved_at, run.speed
        self._values, self._workers, self._recoveries, self._recovery_s = {}, {}, 0, 0.0
        self._set(world_size=run.num_workers, target_workers=run.num_workers)
        self._set(recoveries=self._recoveries, recovery_seconds=self._recovery_s)
        self._ended = threading.Event()
        threading.Thread(target=self._repeat, args=(self._ended,), name="raysgd-gauges", daemon=True).start()

    def on_progress(self, now: Underway) -> None:
        if not now.worker:
            self._began, self._workers = time.monotonic(), {}
        elif now.kind == "train" and now.progress.batches:
            seconds = max(time.monotonic() - self._began, 1e-6)
            self._workers[now.worker] = now.metrics
            samples = max(float(each.get(NUM_SAMPLES) or 0.0) for each in self._workers.values())
            self._set(
                samples_per_second=samples * len(self._workers) / seconds,
                step_seconds=seconds / now.progress.batches,
            )
            self._set_data_seconds(list(self._workers.values()))

    def on_result(self, result: CallResult) -> None:
        self._set(world_size=result.world_size)
        metrics, seconds = result.metrics, max(result.seconds, 1e-6)
        if result.kind == "report":
            self._set(step_seconds=seconds)
        elif result.kind == "train":
            self._set(samples_per_second=float(metrics.get(NUM_SAMPLES) or 0) / seconds, waiting=self._speed().waiting)
            self._set(step_seconds=seconds / max(float(metrics.get(BATCH_COUNT) or 1), 1.0))
            self._set_data_seconds([metrics])

    def _set_data_seconds(self, measured: Sequence[Mapping[str, Any]]) -> None:
        waits = [each[DATA] / each[BATCH_COUNT] for each in measured if DATA in each and each.get(BATCH_COUNT)]
        if waits:
            self._set(data_seconds=statistics.fmean(waits))

    def on_recovery(self, recovery: Recovery) -> None:
        self._recoveries += 1
        self._recovery_s += recovery.seconds
        self._set(world_size=recovery.world_size_after)
        self._set(recoveries=self._recoveries, recovery_seconds=self._recovery_s)

    def on_end(self, failed: bool) -> None:
        if self._ended is not None:
            self._ended.set()

    def _set(self, **values: float) -> None:
        self._values |= {f"raysgd_{name}": float(value) for name, value in values.items()}
        self._set_gauges()

    def _set_gauges(self) -> None:
        if (saved_at := self._saved_at()) is not None:
            self._values["raysgd_checkpoint_age_seconds"] = max(time.time() - saved_at, 0.0)
        for name, value in list(self._values.items()):
            gauge = self._gauges.get(name)
            if gauge is not None:
                gauge.set(value)

    def _repeat(self, ended: threading.Event) -> None:
        while not ended.wait(REPEAT_S) and ray.is_initialized():
            if self._workers:  # an operator trains
                self._values["raysgd_waiting"] = self._speed().waiting
            self._set_gauges()
