"""Print one line per result. Driver."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO

from raysgd.callbacks.base import Callback, CallResult
from raysgd.callbacks.writers import scalars
from raysgd.core.decisions.policy import Recovery
from raysgd.errors import counted, described

OMITTED = ("epoch", "batch_count", "num_samples")


class PrintCallback(Callback):
    """Prints one line for each result and each recovery to `file`, by default sys.stdout.

        train     epoch 1  2 workers  1.3 s  train_loss=0.4312

    `metrics` selects the scalars and their order, by default all except counts and those of the
    last batch.
    """

    def __init__(self, metrics: list[str] | None = None, *, file: TextIO | None = None) -> None:
        self._metrics, self._file = metrics, file

    def on_result(self, result: CallResult) -> None:
        at = f"epoch {result.epoch}" if result.epoch is not None else f"report {result.step}"
        workers = counted(result.world_size, "worker")
        values = scalars(result.metrics)
        chosen = own_metrics(values) if self._metrics is None else {n: values[n] for n in self._metrics if n in values}
        self._print(f"{result.kind:<8}  {at}  {workers}  {result.seconds:.1f} s  {_shown(chosen)}".rstrip())

    def on_recovery(self, recovery: Recovery) -> None:
        workers = f"{recovery.world_size_before} -> {counted(recovery.world_size_after, 'worker')}"
        self._print(f"{recovery.reason}  epoch {recovery.epoch}  {workers}  {recovery.seconds:.1f} s")

    def on_error(self, error: BaseException) -> None:
        self._print(f"failed: {described(error)}".splitlines()[0])

    def _print(self, line: str) -> None:
        print(line, file=self._file or sys.stdout, flush=True)


def own_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers that the operator has measured, without those of the last batch."""
    left_out = ("last_", "_", "profile/")
    return {n: v for n, v in scalars(metrics).items() if n not in OMITTED and not n.startswith(left_out)}


def epoch_line(epoch: int, epochs: int, seconds: float, train: Mapping[str, Any], validation: Mapping[str, Any]) -> str:
    """The line that `fit` prints after an epoch, whose training took `seconds`."""
    shown = _shown(own_metrics(train) | own_metrics(validation))
    speed = train.get("num_samples", 0) / max(seconds, 1e-6)
    return f"epoch {epoch}/{epochs}  {seconds:.1f} s  {shown}  {speed:,.0f} samples/s"


def _shown(numbers: Mapping[str, Any]) -> str:
    return "  ".join(f"{name}={value:.4g}" for name, value in numbers.items())
