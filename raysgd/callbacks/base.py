"""What a callback is told, and the one protocol: six methods, each of which may be left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from raysgd.core.policy import Recovery
from raysgd.core.progress import Progress

__all__ = ["TRACES", "Callback", "Result", "Run", "Underway"]

# Travels with a worker's report, never shown: profiler traces, as {file name: bytes}.
TRACES = "__traces__"
Kind = Literal["train", "validate", "report"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What begins.

    trainer      the trainer's class name
    name         the operator's, or the training function's
    folder       where what is written goes, unless a callback was given a place of its own; it may not exist yet
    """

    trainer: str
    name: str
    num_workers: int
    config: Mapping[str, Any] = field(default_factory=dict)
    folder: Path = Path(".")


@dataclass(frozen=True, kw_only=True)
class Underway:
    """How far one worker says it is in the running call; `metrics` are its own figures so far. `worker` is empty in the
    message that says that a call begins."""

    kind: Kind
    worker: str
    progress: Progress
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One result of a trainer's: of a call of `train` or `validate`, or one round of a function's reports.

    epoch       the epoch it belongs to; None where a function reports none
    step        batches trained until then, since the very first (of a function: its reports)
    metrics     of all workers together; of a function's reports, rank 0's
    by_worker   each rank's own, in rank order
    seconds     how long it took
    traces      of each rank, profiler traces as {file name: bytes}
    """

    kind: Kind
    epoch: int | None
    step: int
    metrics: Mapping[str, Any]
    by_worker: list[dict[str, Any]]
    world_size: int
    seconds: float
    traces: list[dict[str, bytes]] = field(default_factory=list)


class Callback:
    """Override what you need; every method is called on the driver, in the thread that called the trainer.

        class Lowest(Callback):
            lowest = math.inf

            def on_result(self, result):
                self.lowest = min(self.lowest, result.metrics.get("train_loss", math.inf))

    In this order: start, then for each call progress and recoveries until its result (or its error), then the end.

    An error in a callback is reported in the log, with its traceback, and training goes on. In a class that says
    `stops_training = True` it ends the call instead, and the caller of the trainer gets it.
    """

    stops_training: ClassVar[bool] = False

    # What part of the workers' job it is to serve this callback (`ProfilerSettings`); None: no part.
    on_workers: Any = None

    def on_start(self, run: Run) -> None:
        """Before the first worker is started (of a function trainer: before each run)."""

    def on_progress(self, now: Underway) -> None:
        """While a call runs: a few times a second at most, from each worker. Not from functions."""

    def on_result(self, result: Result) -> None:
        """After each call of `train` and `validate`; after each round of reports."""

    def on_recovery(self, recovery: Recovery) -> None:
        """The number of workers has changed, or workers were replaced. In the middle of a call: be quick."""

    def on_error(self, error: BaseException) -> None:
        """A call failed, and its caller gets this error. The trainer may still be used."""

    def on_end(self, failed: bool) -> None:
        """The trainer was shut down (of a function trainer: the run is over). `failed`: by an error, or after one."""
