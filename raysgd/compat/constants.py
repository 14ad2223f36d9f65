"""Constants of `ray.train.constants`. Both."""

from __future__ import annotations

from pathlib import Path

from raysgd.callbacks.base import TRACES
from raysgd.callbacks.folder import RESULTS
from raysgd.train.settings import TIMESTAMP

DATE, HOSTNAME, NODE_IP, PID = "_date", "_hostname", "_node_ip", "_pid"
TIME_THIS_ITER_S, TIME_TOTAL_S, TRAINING_ITERATION = "_time_this_iter_s", "_time_total_s", "_training_iteration"
BASIC_AUTOFILLED_KEYS = {TIMESTAMP, TIME_THIS_ITER_S, TRAINING_ITERATION}
DETAILED_AUTOFILLED_KEYS = {DATE, HOSTNAME, NODE_IP, PID, TIME_TOTAL_S}
ALL_RESERVED_KEYS = BASIC_AUTOFILLED_KEYS | DETAILED_AUTOFILLED_KEYS | {TRACES}
DEFAULT_RESULTS_DIR = Path.home() / RESULTS
