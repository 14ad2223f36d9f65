"""The callbacks of RaySGD and of Ray Tune, on top of `raysgd.callbacks.Callback`. Driver."""

from __future__ import annotations

import inspect
import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raysgd.callbacks.base import Callback, CallResult, Run
from raysgd.callbacks.callback_list import CallbackList, check_callbacks
from raysgd.callbacks.history import History
from raysgd.callbacks.json_files import JsonLoggerCallback
from raysgd.callbacks.mlflow_store import MLflowCallback as MLflowLoggerCallback
from raysgd.callbacks.printing import PrintCallback
from raysgd.callbacks.tensorboard import TensorBoardCallback as TBXLoggerCallback
from raysgd.callbacks.torch_profiler import TorchProfilerCallback as TorchTensorboardProfilerCallback
from raysgd.core.channel.network import own_address

__path__: list[str] = []  # lets Python look for `raysgd.train.callbacks.logging`, which raysgd.compat provides
__all__ = [
    "JsonLoggerCallback",
    "LoggerCallback",
    "MLflowLoggerCallback",
    "PrintCallback",
    "SGDCallback",
    "TBXLoggerCallback",
    "TorchTensorboardProfilerCallback",
    "TrainingCallback",
    "Trial",
    "make_callback_list",
]


class TrainingCallback(Callback):
    """The callback of v1. Override the methods that you need. They are called on the driver."""

    results_preprocessor: Any = None  # has `preprocess(results)`, which returns what `handle_result` gets

    def start_training(self, logdir: Path) -> None:
        """Called before the function runs, with the run's directory `logdir`. May have a parameter
        `config`, for the config, and `**info`."""

    def process_results(self, results: list[dict[str, Any]]) -> None:
        """Called after each round of reports: calls `handle_result` with the `results` of the
        `results_preprocessor`."""
        chosen = self.results_preprocessor
        self.handle_result(results if chosen is None else chosen.preprocess(results))

    def handle_result(self, results: list[dict[str, Any]]) -> None:
        """Called after each round of reports; `results` has one dict per rank, in rank order."""

    def finish_training(self, error: bool = False) -> None:
        """Called when the run has ended. `error` says whether it failed."""

    def on_start(self, run: Run) -> None:
        known = inspect.signature(self.start_training).parameters.values()
        takes_config = any(each.name == "config" or each.kind is inspect.Parameter.VAR_KEYWORD for each in known)
        more: dict[str, Any] = {"config": dict(run.config)} if takes_config else {}
        self.start_training(logdir=run.folder, **more)

    def on_result(self, result: CallResult) -> None:
        self.process_results(result.by_worker)

    def on_end(self, failed: bool) -> None:
        self.finish_training(error=failed)


SGDCallback = TrainingCallback  # its name in ray.util.sgd.v2


@dataclass(eq=False)
class Trial:
    """A run, as Ray Tune's callbacks see it."""

    trial_id: str
    config: dict[str, Any]
    logdir: str
    last_result: dict[str, Any] = field(default_factory=dict)
    trainable_name: str = "function"
    experiment_tag: str = "0"
    checkpoint: None = None  # Tune's loggers would continue the files of a trial that has one

    @property
    def evaluated_params(self) -> dict[str, Any]:
        return self.config

    @property
    def local_path(self) -> str:
        """The run's directory."""
        return self.logdir

    local_dir = path = local_path

    def init_local_path(self) -> None:
        Path(self.logdir).mkdir(parents=True, exist_ok=True)

    def __str__(self) -> str:
        return self.trial_id


class LoggerCallback(Callback):
    """The callback of Ray Tune. Override the methods that you need. `result` is rank 0's, with what
    Tune adds to it, such as `training_iteration`.

    Ray's own callbacks (TBXLoggerCallback, CSVLoggerCallback, JsonLoggerCallback,
    MLflowLoggerCallback) and subclasses of `ray.tune.logger.LoggerCallback` work too.
    """

    trial: Trial | None = None
    _began = _last = 0.0

    def setup(self, **info: Any) -> None:
        """Called before `log_trial_start`, with the arguments of Tune."""

    def log_trial_start(self, trial: Trial) -> None:
        """Called before the function runs. `trial` has its name and its config."""

    def log_trial_result(self, iteration: int, trial: Trial, result: dict[str, Any]) -> None:
        """Called after each round of reports, the first of which has the `iteration` 1.
        `trial.last_result` is the same `result`."""

    def log_trial_end(self, trial: Trial, failed: bool = False) -> None:
        """Called when the run of this `trial` has ended, with an error if it `failed`."""

    def on_start(self, run: Run) -> None:
        self.trial = Trial(run.folder.name, dict(run.config), str(run.folder), trainable_name=run.name)
        self._began = self._last = time.time()
        self.setup(stop=None, num_samples=1, total_num_samples=1)
        self.log_trial_start(self.trial)

    def on_result(self, result: CallResult) -> None:
        if self.trial is not None:
            fields = {name: getattr(self.trial, name) for name in ("trial_id", "experiment_tag", "config")}
            added = autofill(result.step, self._began, self._last, now := time.time())
            self._last = now
            self.trial.last_result = {**added, **fields, **result.metrics}
            self.log_trial_result(result.step, self.trial, self.trial.last_result)

    def on_end(self, failed: bool) -> None:
        if self.trial is not None:
            self.log_trial_end(self.trial, failed)


# The methods that an object needs to be used as one of these callbacks without being a subclass, and the optional ones.
PROTOCOLS: tuple[tuple[type[Callback], tuple[str, ...], tuple[str, ...]], ...] = (
    (
        TrainingCallback,
        ("start_training", "handle_result"),
        ("finish_training", "process_results", "results_preprocessor"),
    ),
    (LoggerCallback, ("log_trial_result",), ("setup", "log_trial_start", "log_trial_end")),
)


def make_callback_list(callbacks: Any, *, history: History | None = None) -> CallbackList:
    """List a function trainer's callbacks, its history first. Raise ConfigError for others."""
    histories = [history] if history is not None else []
    return CallbackList([*histories, *check_callbacks(callbacks, _adapt)])


def _adapt(callback: Any) -> Any:
    """Make a Callback that calls the object's methods, if it has those of v1 or of Ray Tune."""
    if isinstance(callback, Callback):
        return callback
    for base, required, optional in PROTOCOLS:
        if all(callable(getattr(callback, name, None)) for name in required):
            adapter = type(type(callback).__name__, (base,), {})()  # logs show the user's class
            for name in (*required, *optional):
                if hasattr(callback, name):
                    setattr(adapter, name, getattr(callback, name))
            return adapter
    return callback


def autofill(count: int, began: float, last: float, now: float) -> dict[str, Any]:
    """Return what Ray adds to report number `count`, under Ray's names. `last`: the time before."""
    return {
        "timestamp": int(now),
        "date": time.strftime("%Y-%m-%d_%H-%M-%S", time.localtime(now)),
        "time_this_iter_s": now - last,
        "time_total_s": now - began,
        "time_since_restore": now - began,
        "training_iteration": count,
        "iterations_since_restore": count,
        "hostname": platform.node(),
        "node_ip": own_address(),
        "pid": os.getpid(),
        "done": False,
    }
