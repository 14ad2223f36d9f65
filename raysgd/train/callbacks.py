"""The names that v1 of RaySGD and Ray Tune have for callbacks, on top of `raysgd.callbacks.Callback`. Driver."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

from raysgd.callbacks.base import Callback, CallResult, Run
from raysgd.callbacks.callback_list import CallbackList, check_callbacks
from raysgd.callbacks.history import History
from raysgd.callbacks.json_files import JsonLoggerCallback
from raysgd.callbacks.mlflow_store import MLflowCallback as MLflowLoggerCallback
from raysgd.callbacks.printing import PrintCallback
from raysgd.callbacks.tensorboard import TensorBoardCallback as TBXLoggerCallback
from raysgd.callbacks.torch_profiler import TorchProfilerCallback as TorchTensorboardProfilerCallback

__all__ = [
    "JsonLoggerCallback",
    "LoggerCallback",
    "MLflowLoggerCallback",
    "PrintCallback",
    "TBXLoggerCallback",
    "TorchTensorboardProfilerCallback",
    "TrainingCallback",
    "Trial",
    "make_callback_list",
]


class TrainingCallback(Callback):
    """The callback of v1. Override the methods that you need. They are called on the driver."""

    def start_training(self, logdir: str) -> None:
        """Called before the function runs, with the run's directory. May have a parameter `config`, for the config."""

    def handle_result(self, results: list[dict[str, Any]]) -> None:
        """Called after each round of reports, with one dict per rank, in rank order."""

    def finish_training(self, error: bool = False) -> None:
        """Called when the run has ended. `error` says whether it failed."""

    def on_start(self, run: Run) -> None:
        known = inspect.signature(self.start_training).parameters.values()
        takes_config = any(each.name == "config" or each.kind is inspect.Parameter.VAR_KEYWORD for each in known)
        more: dict[str, Any] = {"config": dict(run.config)} if takes_config else {}
        self.start_training(logdir=str(run.folder), **more)

    def on_result(self, result: CallResult) -> None:
        self.handle_result(result.by_worker)

    def on_end(self, failed: bool) -> None:
        self.finish_training(error=failed)


@dataclass
class Trial:
    """A run, as Ray Tune's callbacks see it."""

    trial_id: str
    config: dict[str, Any]
    logdir: str
    last_result: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.trial_id


class LoggerCallback(Callback):
    """The callback of Ray Tune. Override the methods that you need. `result` is rank 0's.

    A subclass of `ray.tune.logger.LoggerCallback` that overrides these three methods works too.
    """

    trial: Trial | None = None

    def log_trial_start(self, trial: Trial) -> None:
        """Called before the function runs."""

    def log_trial_result(self, iteration: int, trial: Trial, result: dict[str, Any]) -> None:
        """Called after each round of reports. `trial.last_result` is the same result."""

    def log_trial_end(self, trial: Trial, failed: bool = False) -> None:
        """Called when the run has ended."""

    def on_start(self, run: Run) -> None:
        self.trial = Trial(run.folder.name, dict(run.config), str(run.folder))
        self.log_trial_start(self.trial)

    def on_result(self, result: CallResult) -> None:
        if self.trial is not None:
            self.trial.last_result = dict(result.metrics)
            self.log_trial_result(result.step, self.trial, self.trial.last_result)

    def on_end(self, failed: bool) -> None:
        if self.trial is not None:
            self.log_trial_end(self.trial, failed)


# The methods that an object needs to be used as one of these callbacks without being a subclass, and the optional ones.
PROTOCOLS: tuple[tuple[type[Callback], tuple[str, ...], tuple[str, ...]], ...] = (
    (TrainingCallback, ("start_training", "handle_result"), ("finish_training",)),
    (LoggerCallback, ("log_trial_result",), ("log_trial_start", "log_trial_end")),
)


def make_callback_list(callbacks: Any, *, history: History | None = None) -> CallbackList:
    """Return a function trainer's callbacks, with its history first. Raise ConfigError for anything else."""
    return CallbackList([*([history] if history is not None else []), *check_callbacks(callbacks, _adapt)])


def _adapt(given: Any) -> Any:
    """Return a Callback that calls the object's methods, if it has those of v1 or of Ray Tune."""
    if isinstance(given, Callback):
        return given
    for base, required, optional in PROTOCOLS:
        if all(callable(getattr(given, name, None)) for name in required):
            adapter = type(type(given).__name__, (base,), {})()  # logs show the user's class
            for name in (*required, *optional):
                if hasattr(given, name):
                    setattr(adapter, name, getattr(given, name))
            return adapter
    return given
