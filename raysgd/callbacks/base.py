"""The callback protocol: optional methods, and the values that they are called with. Both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from raysgd.core.decisions.policy import Recovery
from raysgd.core.measures.progress import Progress
from raysgd.core.measures.speed import Speed
from raysgd.errors import suggesting_fields

# The key of profiler traces, {file name: bytes}, in a worker's report. Users never see it.
TRACES = "__traces__"
Kind = Literal["train", "validate", "test", "report", "batch"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is about to run.

    trainer      the trainer's class name
    num_workers  the largest number of workers
    config       the trainer's config
    functions    whether it runs a training function, and not an operator
    name         the name of the operator or of the training function
    folder       where callbacks write, unless they were given a path of their own; it may not exist
                 yet
    processes    returns (machine, process id) of each current rank. Any thread may call it
    speed        returns what `trainer.speed` is; nothing for training functions
    """

    trainer: str
    name: str
    num_workers: int
    config: Mapping[str, Any] = field(default_factory=dict)
    folder: Path = Path(".")
    functions: bool = False
    processes: Callable[[], Sequence[tuple[str, int]]] = field(default=lambda: (), compare=False, repr=False)
    speed: Callable[[], Speed] = field(default=Speed, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class Underway:
    """The progress of one worker in the running call, with that worker's metrics so far. The first
    one of a call announces the call, and has an empty `worker`.

    kind        "train", "validate" or "test"
    progress    the epoch, and the batches and samples that the worker has done
    metrics     its metrics so far
    world_size  how many workers there are
    """

    kind: Kind
    worker: str
    progress: Progress
    metrics: Mapping[str, Any] = field(default_factory=dict)
    world_size: int = 1


@dataclass(frozen=True, kw_only=True)
class CallResult:
    """The result of one call of `train`, `validate` or `test`, or one round of a function's
    reports.

    kind        "train", "validate", "test", "report" for a training function, or "batch" for a
                point within a call, which only a callback with `log_every` makes
    world_size  how many workers there were at its end
    epoch       the epoch of the result; None if a training function does not report one
    step        batches trained since the start of training; for a training function, the number of
                its reports
    metrics     the metrics merged over all workers; for a training function, those of rank 0
    by_worker   each rank's own metrics, in rank order; if the workers changed in the call,
                generation by generation
    seconds     how long it took
    traces      profiler traces of each rank, as {file name: bytes}
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
    """Override the methods that you need. They are called on the driver, in the thread that called
    the trainer.

        class Lowest(Callback):
            lowest = math.inf

            def on_result(self, result):
                self.lowest = min(self.lowest, result.metrics.get("train_loss", math.inf))

    The order is: the start; a resume; for each call, progress and recoveries, and then its result
    or its error; the end.

    An error in a callback is logged with its traceback, and training continues. In a class with
    `stops_training = True` it ends the call instead, and the trainer's caller gets it.
    """

    stops_training: ClassVar[bool] = False

    # Set this to True to end the loop over `trainer.epochs()`, or `trainer.fit()`, after the current epoch.
    wants_stop: bool = False
    stop_reason: str = ""  # for the line in the log that says so

    # What the workers do for this callback (`ProfilerSettings`), if anything.
    on_workers: Any = None

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "__init__" in vars(cls):
            suggesting_fields(cls)

    def on_start(self, run: Run) -> None:
        """Called before the first worker starts (for functions: before each run) with the `run`."""

    def on_resume(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Called after an automatic checkpoint was loaded, or the run of a script that has ended
        was taken over, with the `rows` of its history."""

    def on_progress(self, now: Underway) -> None:
        """Called a few times per second with the progress `now` of a worker. Not for functions."""

    def on_result(self, result: CallResult) -> None:
        """Called with the `result` of each `train`, `validate` and `test`, and round of reports."""

    def extra_metrics(self, result: CallResult) -> Mapping[str, Any]:
        """Return metrics to add to this `result`. Called before any callback gets the result."""
        return {}

    def on_recovery(self, recovery: Recovery) -> None:
        """Called with a `recovery`: a change of the workers. Be quick: a call is waiting."""

    def on_wait(self, what: str) -> None:
        """Called when a recovery begins to wait; `what` says for what. Not for functions."""

    def on_error(self, error: BaseException) -> None:
        """Called when a call fails with this `error`. The trainer may still be usable."""

    def on_end(self, failed: bool) -> None:
        """Called at the trainer's shutdown (for functions: a run's end). `failed`: by an error."""
