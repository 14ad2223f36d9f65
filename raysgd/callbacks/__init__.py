"""What watches a run: objects that are told of progress and results. Each is loaded when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raysgd.callbacks.base import Callback, Result, Run, Underway
    from raysgd.callbacks.csv_files import CSVCallback
    from raysgd.callbacks.history import History
    from raysgd.callbacks.json_files import JsonLinesCallback, JsonLoggerCallback
    from raysgd.callbacks.mlflow_store import MLflowCallback
    from raysgd.callbacks.printing import PrintCallback
    from raysgd.callbacks.progress_bar import ProgressBar
    from raysgd.callbacks.ray_metrics import RayMetricsCallback
    from raysgd.callbacks.tensorboard import TensorBoardCallback
    from raysgd.callbacks.torch_profiler import TorchProfilerCallback
    from raysgd.callbacks.wandb_runs import WandbCallback

__all__ = [
    "CSVCallback",
    "Callback",
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

_HOMES = {
    "CSVCallback": "raysgd.callbacks.csv_files",
    "Callback": "raysgd.callbacks.base",
    "History": "raysgd.callbacks.history",
    "JsonLinesCallback": "raysgd.callbacks.json_files",
    "JsonLoggerCallback": "raysgd.callbacks.json_files",
    "MLflowCallback": "raysgd.callbacks.mlflow_store",
    "PrintCallback": "raysgd.callbacks.printing",
    "ProgressBar": "raysgd.callbacks.progress_bar",
    "RayMetricsCallback": "raysgd.callbacks.ray_metrics",
    "Result": "raysgd.callbacks.base",
    "Run": "raysgd.callbacks.base",
    "TensorBoardCallback": "raysgd.callbacks.tensorboard",
    "TorchProfilerCallback": "raysgd.callbacks.torch_profiler",
    "Underway": "raysgd.callbacks.base",
    "WandbCallback": "raysgd.callbacks.wandb_runs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'raysgd.callbacks' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
