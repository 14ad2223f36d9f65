"""Show one progress bar for all workers: epoch, batches, speed, metrics, workers. Driver."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from raysgd.callbacks.base import Callback, CallResult, Run, Underway
from raysgd.callbacks.writers import COUNTS
from raysgd.core.decisions.policy import Recovery
from raysgd.core.measures.speed import Speed
from raysgd.errors import ranked

SHOWN = 6
UNITS = {"batch": "batches", "report": "reports"}


class ProgressBar(Callback):
    """Owns one tqdm bar at a time, in a terminal or in a notebook; elsewhere, such as in a log
    file, it writes one line for each call. Counts batches, of which all ranks have the same number,
    or the reports of a training function. Shows the first six metrics (while a call runs, their
    newest values; at its end, what it returns, and ranks that are slow), the workers that are
    present and wanted (`workers=3/4`), and what a recovery waits for.

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
        in_notebook = any("notebook" in kind.__module__ for kind in tqdm.__mro__)
        self._lines = not in_notebook and not sys.stderr.isatty()
        self._workers = self._wanted = 0
        self._speed: Callable[[], Speed] = Speed
        self._parts: dict[str, str] = {}
        self._bar: Any = None
        self._samples: dict[str, float] = {}
        self._started = 0.0

    def on_start(self, run: Run) -> None:
        self._workers = self._wanted = run.num_workers
        self._speed = run.speed

    def on_recovery(self, recovery: Recovery) -> None:
        self._workers = recovery.world_size_after
        if recovery.reason == "shrink":
            self._wanted = self._workers
        self._wanted = max(self._wanted, self._workers)
        self._show()

    def on_wait(self, what: str) -> None:
        self._show(what)
        if self._bar is not None:
            self._bar.refresh()

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
        bar, self._workers = self._bar, result.world_size
        self._wanted = max(self._wanted, self._workers)
        if result.kind == "report":
            self._set_postfix(result.metrics, 0.0, result.epoch or 0)
            bar.update(1)
            return
        batches = int(result.metrics.get("batch_count", bar.n))
        bar.total = batches
        means = {name: value for name, value in result.metrics.items() if not name.startswith("last_")}
        self._set_postfix(means, float(result.metrics.get("num_samples") or 0), result.epoch or 0)
        bar.update(max(batches - bar.n, 0))
        if result.kind == "train" and (slow := self._speed()).slow:
            self._parts["slow"] = f"{ranked(slow.slow)} ({slow.phase})"
            self._show()
        self._close()

    def on_error(self, error: BaseException) -> None:
        self._close(f", then {type(error).__name__}")

    def on_end(self, failed: bool) -> None:
        self._close()

    def _open(self, label: str, unit: str) -> None:
        file = open(os.devnull, "w", encoding="utf-8") if self._lines else None  # noqa: SIM115  # `_close` closes it
        self._bar = self._tqdm(desc=label, unit=unit, leave=True, mininterval=0.2, file=file)
        self._samples, self._parts = {}, {}
        self._started = time.monotonic()

    def _close(self, end: str = "") -> None:
        bar, self._bar = self._bar, None
        if bar is None:
            return
        bar.refresh()
        bar.close()
        if self._lines:
            bar.fp.close()
            count = f"{bar.n} {bar.unit if bar.n == 1 else UNITS[bar.unit]}{end}"
            line = ", ".join(filter(None, (count, bar.postfix)))
            print(f"{bar.desc.removesuffix(': ')}: {line}", file=sys.stderr, flush=True)

    def _set_postfix(self, metrics: Mapping[str, Any], samples: float, epoch: int) -> None:
        parts: dict[str, str] = {"epoch": str(epoch)} if epoch else {}
        numbers = {name: value for name, value in metrics.items() if isinstance(value, float) and name not in COUNTS}
        names = [name for name in numbers if not name.startswith("last_")]
        for name in names[:SHOWN]:
            parts[name] = f"{numbers.get(f'last_{name}', numbers[name]):.4g}"
        if samples:
            seconds = max(time.monotonic() - self._started, 1e-6)
            parts["samples/s"] = f"{samples / seconds:,.0f}"
        self._parts = parts
        self._show()

    def _show(self, waits_for: str = "") -> None:
        """Show metrics and workers; the next progress replaces what was waited for."""
        if self._bar is None:
            return
        parts = {"waiting for": waits_for} if waits_for else {}  # first, because a narrow terminal cuts the end
        parts |= self._parts
        if self._wanted > 1:
            parts["workers"] = f"{self._workers}/{self._wanted}"
        self._bar.set_postfix(parts, refresh=False)
