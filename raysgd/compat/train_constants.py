"""The names of `ray.train.constants`. Both."""

from __future__ import annotations

from pathlib import Path

from raysgd.callbacks.base import TRACES as PYTORCH_PROFILER_KEY
from raysgd.callbacks.folder import RESULTS
from raysgd.config import FUNCTION_START_LIMIT as TRAIN_PLACEMENT_GROUP_TIMEOUT_S_ENV
from raysgd.ray_data.datasets import DEFAULT_NAME as TRAIN_DATASET_KEY
from raysgd.train.run import DETAILED as ENABLE_DETAILED_AUTOFILLED_METRICS_ENV
from raysgd.train.settings import TIMESTAMP

__all__ = [
    "ALL_RESERVED_KEYS",
    "BASIC_AUTOFILLED_KEYS",
    "DATE",
    "DEFAULT_RESULTS_DIR",
    "DETAILED_AUTOFILLED_KEYS",
    "ENABLE_DETAILED_AUTOFILLED_METRICS_ENV",
    "HOSTNAME",
    "NODE_IP",
    "PID",
    "PYTORCH_PROFILER_KEY",
    "TIMESTAMP",
    "TIME_THIS_ITER_S",
    "TIME_TOTAL_S",
    "TRAINING_ITERATION",
    "TRAIN_DATASET_KEY",
    "TRAIN_PLACEMENT_GROUP_TIMEOUT_S_ENV",
]

DATE, HOSTNAME, NODE_IP, PID = "_date", "_hostname", "_node_ip", "_pid"
TIME_THIS_ITER_S, TIME_TOTAL_S, TRAINING_ITERATION = "_time_this_iter_s", "_time_total_s", "_training_iteration"
BASIC_AUTOFILLED_KEYS = {TIMESTAMP, TIME_THIS_ITER_S, TRAINING_ITERATION}
DETAILED_AUTOFILLED_KEYS = {DATE, HOSTNAME, NODE_IP, PID, TIME_TOTAL_S}
ALL_RESERVED_KEYS = BASIC_AUTOFILLED_KEYS | DETAILED_AUTOFILLED_KEYS | {PYTORCH_PROFILER_KEY}
DEFAULT_RESULTS_DIR = Path.home() / RESULTS
