"""Callbacks: objects whose methods are called with a trainer's progress and results. Driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysgd.callbacks.base import Callback, CallResult, Run, Underway
from raysgd.callbacks.csv_files import CSVCallback
from raysgd.callbacks.early_stopping import EarlyStopping
from raysgd.callbacks.history import History
from raysgd.callbacks.json_files import JsonLinesCallback, JsonLoggerCallback
from raysgd.callbacks.mlflow_store import MLflowCallback
from raysgd.callbacks.monitors import EMA, GradientNormMonitor, LearningRateMonitor, Throughput
from raysgd.callbacks.printing import PrintCallback
from raysgd.callbacks.progress_bar import ProgressBar
from raysgd.callbacks.tensorboard import TensorBoardCallback
from raysgd.callbacks.torch_profiler import TorchProfilerCallback
from raysgd.callbacks.wandb_runs import WandbCallback
from raysgd.core.lazy import lazy_names

if TYPE_CHECKING:
    from raysgd.callbacks.ray_metrics import RayMetricsCallback

__all__ = [
    "EMA",
    "CSVCallback",
    "CallResult",
    "Callback",
    "EarlyStopping",
    "GradientNormMonitor",
    "History",
    "JsonLinesCallback",
    "JsonLoggerCallback",
    "LearningRateMonitor",
    "MLflowCallback",
    "PrintCallback",
    "ProgressBar",
    "RayMetricsCallback",
    "Run",
    "TensorBoardCallback",
    "Throughput",
    "TorchProfilerCallback",
    "Underway",
    "WandbCallback",
]
# The module of this one imports Ray.
_HOMES = {"RayMetricsCallback": "raysgd.callbacks.ray_metrics"}
__getattr__, __dir__ = lazy_names("raysgd.callbacks", _HOMES, __all__)
