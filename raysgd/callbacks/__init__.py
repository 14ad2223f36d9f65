"""Callbacks: objects whose methods are called with a trainer's progress and results. Driver."""

from __future__ import annotations

from raysgd.callbacks.base import Callback, CallResult, Run, Underway
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
    "Run",
    "TensorBoardCallback",
    "TorchProfilerCallback",
    "Underway",
    "WandbCallback",
]
