"""Constants of `ray.train.constants`, and two limits of RaySGD that the environment can set. Both.

The limits are read from the environment each time `constants.NAME` is evaluated;
`from ... import NAME` keeps the value of that moment.
"""

from __future__ import annotations

from pathlib import Path

from raysgd.callbacks.base import TRACES
from raysgd.environment import seconds_from_environment
from raysgd.storage.log_folders import RESULTS
from raysgd.train.settings import TIMESTAMP

DATE, HOSTNAME, NODE_IP, PID = "_date", "_hostname", "_node_ip", "_pid"
TIME_THIS_ITER_S, TIME_TOTAL_S, TRAINING_ITERATION = "_time_this_iter_s", "_time_total_s", "_training_iteration"
BASIC_AUTOFILLED_KEYS = {TIMESTAMP, TIME_THIS_ITER_S, TRAINING_ITERATION}
DETAILED_AUTOFILLED_KEYS = {DATE, HOSTNAME, NODE_IP, PID, TIME_TOTAL_S}
ALL_RESERVED_KEYS = BASIC_AUTOFILLED_KEYS | DETAILED_AUTOFILLED_KEYS | {TRACES}
DEFAULT_RESULTS_DIR = Path.home() / RESULTS
DEFAULT_SECONDS = {"NCCL_TIMEOUT_S": 1800, "SGD_PLACEMENT_GROUP_TIMEOUT_S": 100}


def __getattr__(name: str) -> int:
    if name not in DEFAULT_SECONDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return seconds_from_environment(name, DEFAULT_SECONDS[name])
