"""Callbacks: objects whose methods are called with a trainer's progress and results. Driver."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from raysgd.callbacks.base import Callback, CallResult, Result, Run, Underway
from raysgd.callbacks.csv_files import CSVCallback
from raysgd.callbacks.early_stopping import EarlyStopping
from raysgd.callbacks.history import History
from raysgd.callbacks.json_files import JsonLinesCallback, JsonLoggerCallback
from raysgd.callbacks.mlflow_store import MLflowCallback
from raysgd.callbacks.printing import PrintCallback
from raysgd.callbacks.progress_bar import ProgressBar
from raysgd.callbacks.tensorboard import TensorBoardCallback
from raysgd.callbacks.torch_profiler import TorchProfilerCallback
from raysgd.callbacks.wandb_runs import WandbCallback

if TYPE_CHECKING:
    from raysgd.callbacks.ray_metrics import RayMetricsCallback

__all__ = [
    "CSVCallback",
    "CallResult",
    "Callback",
    "EarlyStopping",
    "History",
    "JsonLinesCallback",
    "JsonLoggerCallback",
    "MLflowCallback",
    "PrintCallback",
    "ProgressBar",
    "RayMetricsCallback",
    "Result",
    "Run",
    "TensorBoardCallback",
    "TorchProfilerCallback",
    "Underway",
    "WandbCallback",
]


def __getattr__(name: str) -> Any:
    if name != "RayMetricsCallback":
        raise AttributeError(f"module 'raysgd.callbacks' has no attribute {name!r}")
    return import_module("raysgd.callbacks.ray_metrics").RayMetricsCallback  # imports Ray


def __dir__() -> list[str]:
    return sorted(__all__)
