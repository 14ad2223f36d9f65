"""Show one progress bar for all workers: epoch, batches, samples per second, training loss. Driver."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from raysgd.callbacks.base import Callback, CallResult, Underway

__all__ = ["ProgressBar"]


class ProgressBar(Callback):
    """Owns one tqdm bar at a time, in a terminal or in a notebook. Counts batches, of which all ranks have the same
    number, or the reports of a training function.

    `TorchTrainer(use_tqdm=True)` and `TFTrainer(use_tqdm=True)` create one.
    """

    def __init__(self) -> None:
        try:
            from tqdm.auto import tqdm
        except ImportError as error:
            raise ValueError(
                "a progress bar needs tqdm: pip install tqdm (or raysgd[torch]), or pass use_tqdm=False"
            ) from error
        self._tqdm: Any = tqdm
        self._bar: Any = None
        self._samples: dict[str, float] = {}
        self._started = 0.0

    def on_progress(self, now: Underway) -> None:
        if self._bar is None:
            self._open(now.kind, "batch")
        if not now.worker:
            return
        bar, progress = self._bar, now.progress
        if progress.expected and bar.total != progress.expected:
            bar.total = progress.expected
        self._samples[now.worker] = float(now.metrics.get("num_samples") or 0.0)
        self._set_postfix(now.metrics, max(self._samples.values()) * len(self._samples), progress.epoch)
        if progress.batches > bar.n:
            bar.update(progress.batches - bar.n)

    def on_result(self, result: CallResult) -> None:
        if self._bar is None:
            self._open(result.kind, "report" if result.kind == "report" else "batch")
        bar = self._bar
        if result.kind == "report":
            self._set_postfix(result.metrics, 0.0, result.epoch or 0)
            bar.update(1)
            return
        batches = int(result.metrics.get("batch_count", bar.n))
        bar.total = batches
        self._set_postfix(result.metrics, float(result.metrics.get("num_samples") or 0), result.epoch or 0)
        bar.update(max(batches - bar.n, 0))
        self._close()

    def on_error(self, error: BaseException) -> None:
        self._close()

    def on_end(self, failed: bool) -> None:
        self._close()

    def _open(self, label: str, unit: str) -> None:
        self._bar = self._tqdm(desc=label, unit=unit, leave=True, mininterval=0.2)
        self._samples = {}
        self._started = time.monotonic()

    def _close(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.refresh()
            bar.close()

    def _set_postfix(self, metrics: Mapping[str, Any], samples: float, epoch: int) -> None:
        parts: dict[str, str] = {"epoch": str(epoch)} if epoch else {}
        for name, value in metrics.items():
            if name.endswith("loss") and not name.startswith("last_") and isinstance(value, float):
                latest = metrics.get(f"last_{name}", value)
                parts[name] = f"{latest if isinstance(latest, float) else value:.4g}"
        if samples:
            seconds = max(time.monotonic() - self._started, 1e-6)
            parts["samples/s"] = f"{samples / seconds:,.0f}"
        self._bar.set_postfix(parts, refresh=False)
