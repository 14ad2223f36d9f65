"""What a function trainer tells while it runs. The protocol is `raysgd.callbacks.Callback`'s; here are v1's three names
for it, and Ray Tune's."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from raysgd.callbacks.base import TRACES, Callback, Result, Run
from raysgd.callbacks.callback_list import CallbackList, check_callbacks
from raysgd.callbacks.history import History
from raysgd.callbacks.json_files import JsonLoggerCallback
from raysgd.callbacks.mlflow_store import MLflowCallback as MLflowLoggerCallback
from raysgd.callbacks.printing import PrintCallback
from raysgd.callbacks.tensorboard import TensorBoardCallback as TBXLoggerCallback
from raysgd.callbacks.torch_profiler import TorchProfilerCallback as TorchTensorboardProfilerCallback
from raysgd.core.metrics import plain
from raysgd.core.policy import Recovery
from raysgd.errors import ConfigError

__all__ = [
    "JsonLoggerCallback",
    "LoggerCallback",
    "MLflowLoggerCallback",
    "PrintCallback",
    "RunCallbacks",
    "TBXLoggerCallback",
    "TorchTensorboardProfilerCallback",
    "TrainingCallback",
    "Trial",
    "without_traces",
]


class TrainingCallback(Callback):
    """Override what you need; all three are called on the driver."""

    def start_training(self, logdir: str) -> None:
        """Before the function runs; `logdir` is the run's directory. One that takes `config` is given it too."""

    def handle_result(self, results: list[dict[str, Any]]) -> None:
        """After each round of reports: one dict per rank, in rank order."""

    def finish_training(self, error: bool = False) -> None:
        """At the end, always; `error` says whether the run failed."""

    def on_start(self, run: Run) -> None:
        _start(self.start_training, run)

    def on_result(self, result: Result) -> None:
        self.handle_result(result.by_worker)

    def on_end(self, failed: bool) -> None:
        self.finish_training(error=failed)


@dataclass
class Trial:
    """A run, as Ray Tune's callbacks call it."""

    trial_id: str
    config: dict[str, Any]
    logdir: str
    last_result: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.trial_id


class LoggerCallback(Callback):
    """Ray Tune's names: override what you need. `result` is rank 0's. (A subclass of `ray.tune.logger.LoggerCallback`
    that overrides these three will do as well.)"""

    trial: Trial | None = None

    def log_trial_start(self, trial: Trial) -> None:
        """Before the function runs."""

    def log_trial_result(self, iteration: int, trial: Trial, result: dict[str, Any]) -> None:
        """After each round of reports; `trial.last_result` is the same."""

    def log_trial_end(self, trial: Trial, failed: bool = False) -> None:
        """At the end, always."""

    def on_start(self, run: Run) -> None:
        self.trial = Trial(run.folder.name, dict(run.config), str(run.folder))
        self.log_trial_start(self.trial)

    def on_result(self, result: Result) -> None:
        if self.trial is not None:
            self.trial.last_result = dict(result.metrics)
            self.log_trial_result(result.step, self.trial, self.trial.last_result)

    def on_end(self, failed: bool) -> None:
        if self.trial is not None:
            self.log_trial_end(self.trial, failed)


class _Training(TrainingCallback):
    """An object with v1's methods that is no TrainingCallback."""

    def __init__(self, given: Any) -> None:
        self._given = given

    def on_start(self, run: Run) -> None:
        _start(self._given.start_training, run)

    def handle_result(self, results: list[dict[str, Any]]) -> None:
        self._given.handle_result(results)

    def finish_training(self, error: bool = False) -> None:
        if hasattr(self._given, "finish_training"):
            self._given.finish_training(error=error)


class _Logger(LoggerCallback):
    """An object with Ray Tune's methods."""

    def __init__(self, given: Any) -> None:
        self._given = given

    def log_trial_start(self, trial: Trial) -> None:
        if hasattr(self._given, "log_trial_start"):
            self._given.log_trial_start(trial)

    def log_trial_result(self, iteration: int, trial: Trial, result: dict[str, Any]) -> None:
        self._given.log_trial_result(iteration, trial, result)

    def log_trial_end(self, trial: Trial, failed: bool = False) -> None:
        if hasattr(self._given, "log_trial_end"):
            self._given.log_trial_end(trial, failed)


class RunCallbacks:
    """Tells a function trainer's callbacks, and its history. Called in the thread of whoever follows the run."""

    def __init__(self, callbacks: Iterable[Any] | None, *, history: History | None = None) -> None:
        # A history is a sequence, and a callback: not the list of them.
        if callbacks is not None and (isinstance(callbacks, Callback) or not isinstance(callbacks, Iterable)):
            raise ConfigError(f"callbacks must be a list of raysgd.callbacks.Callback objects, got {callbacks!r}")
        self._told = CallbackList(
            [
                *([history] if history is not None else []),
                *check_callbacks(_adapted(() if callbacks is None else callbacks)),
            ]
        )
        self._rounds = 0
        self._recoveries = 0

    def start_training(self, run: Run) -> None:
        self._told.start(run)
        self._told.raise_stop()

    def handle_result(self, results: list[dict[str, Any]]) -> None:
        self._rounds += 1
        rows = [{name: plain(value) for name, value in row.items()} for row in without_traces(results)]
        first = rows[0] if rows else {}
        epoch = first.get("epoch")
        self._told.result(
            Result(
                kind="report",
                epoch=epoch if isinstance(epoch, int) else None,
                step=int(_finite(first.get("_training_iteration"), self._rounds)),
                metrics=first,
                by_worker=rows,
                world_size=len(rows),
                seconds=float(_finite(first.get("_time_this_iter_s"), 0.0)),
                traces=[row.get(TRACES, {}) for row in results],
            )
        )
        self._told.raise_stop()

    def handle_recoveries(self, recoveries: Sequence[Recovery]) -> None:
        """All of this run so far; those that are new are told."""
        for recovery in recoveries[self._recoveries :]:
            self._told.recovery(recovery)
        self._recoveries = max(self._recoveries, len(recoveries))
        self._told.raise_stop()

    def finish_training(self, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, GeneratorExit):
            self._told.error(error)
        self._told.end(failed=error is not None)


def _finite(value: Any, otherwise: float) -> float:
    """Return what was filled in, unless the function reported something else under that name."""
    return value if isinstance(value, (int, float)) and math.isfinite(value) else otherwise


def without_traces(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the ranks reported, for everybody but the profiler's callback."""
    return [{name: value for name, value in row.items() if name != TRACES} for row in rows]


def _start(start_training: Callable[..., Any], run: Run) -> None:
    """Some of v1's callbacks take the config too."""
    known = inspect.signature(start_training).parameters.values()
    takes_config = any(each.name == "config" or each.kind is inspect.Parameter.VAR_KEYWORD for each in known)
    more = {"config": dict(run.config)} if takes_config else {}
    start_training(logdir=str(run.folder), **more)


def _adapted(callbacks: Iterable[Any]) -> list[Any]:
    """The protocol's own as they are; objects that know one of its older names, in it."""
    return [_protocol(each) if not isinstance(each, (type, Callback)) else each for each in callbacks]


def _protocol(given: Any) -> Any:
    if all(callable(getattr(given, name, None)) for name in ("start_training", "handle_result")):
        return _Training(given)
    return _Logger(given) if callable(getattr(given, "log_trial_result", None)) else given
