"""One bar on the driver for all workers: epoch, batches, samples per second, current loss."""

from __future__ import annotations

import time
from typing import Any

from raysgd.progress import Progress

__all__ = ["NoBar", "ProgressBar", "make_bar"]


class NoBar:
    """Shows nothing."""

    def open(self, label: str) -> None:
        """A call begins."""

    def update(self, worker: str, progress: Progress, partial: dict[str, Any] | None) -> None:
        """A worker told how far it is."""

    def close(self, result: dict[str, Any] | None) -> None:
        """The call is over."""


class ProgressBar(NoBar):
    """Owns one tqdm bar at a time; works in a terminal and in a notebook. Counts batches, which all ranks share."""

    def __init__(self) -> None:
        try:
            from tqdm.auto import tqdm
        except ImportError as error:
            raise ValueError(
                "use_tqdm=True needs tqdm: pip install tqdm (or raysgd[torch]), or leave use_tqdm off"
            ) from error
        self._tqdm: Any = tqdm
        self._bar: Any = None
        self._samples: dict[str, float] = {}
        self._started = 0.0

    def open(self, label: str) -> None:
        self._bar = self._tqdm(desc=label, unit="batch", leave=True, mininterval=0.2)
        self._samples = {}
        self._started = time.monotonic()

    def update(self, worker: str, progress: Progress, partial: dict[str, Any] | None) -> None:
        bar = self._bar
        if bar is None:
            return
        if progress.expected and bar.total != progress.expected:
            bar.total = progress.expected
        told = partial or {}
        self._samples[worker] = float(told.get("num_samples") or 0.0)
        self._describe(told, max(self._samples.values()) * len(self._samples), progress.epoch)
        if progress.batches > bar.n:
            bar.update(progress.batches - bar.n)

    def close(self, result: dict[str, Any] | None) -> None:
        bar, self._bar = self._bar, None
        if bar is None:
            return
        self._bar = bar
        if result:
            batches = int(result.get("batch_count", bar.n))
            bar.total = batches
            self._describe(result, float(result.get("num_samples") or 0), int(result.get("epoch") or 0))
            bar.update(max(batches - bar.n, 0))
        bar.refresh()
        bar.close()
        self._bar = None

    def _describe(self, told: dict[str, Any], samples: float, epoch: int) -> None:
        parts: dict[str, str] = {"epoch": str(epoch)} if epoch else {}
        for name, value in told.items():
            if name.endswith("loss") and not name.startswith("last_") and isinstance(value, float):
                latest = told.get(f"last_{name}", value)
                parts[name] = f"{latest if isinstance(latest, float) else value:.4g}"
        seconds = max(time.monotonic() - self._started, 1e-6)
        parts["samples/s"] = f"{samples / seconds:,.0f}"
        self._bar.set_postfix(parts, refresh=False)


def make_bar(use_tqdm: bool) -> NoBar:
    return ProgressBar() if use_tqdm else NoBar()
