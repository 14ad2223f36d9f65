"""Functions of `ray.util.sgd.torch`: a process group by hand, and operators for tests. Both."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from raysgd.compat.utils import find_free_port
from raysgd.constants import NUM_SAMPLES
from raysgd.torch.operator import TrainingOperator


def setup_address() -> str:
    """Choose an address for `setup_process_group`, with a port that was free a moment ago."""
    import ray

    return f"tcp://{ray.util.get_node_ip_address()}:{find_free_port()}"


def setup_process_group(url: str, world_rank: int, world_size: int, timeout: float, backend: str = "gloo") -> None:
    """Join a process group of torch. `timeout` is the limit in seconds of its collective calls."""
    if backend == "nccl":
        os.environ.setdefault("NCCL_BLOCKING_WAIT", "1")
    limit = timedelta(seconds=timeout)
    dist.init_process_group(backend, init_method=url, rank=world_rank, world_size=world_size, timeout=limit)


def get_test_operator(operator_cls: type[TrainingOperator]) -> type[TrainingOperator]:
    """Make a subclass whose epochs and validations do nothing and return `{"done": 1}`, or what
    `config["custom_func"](operator, iterator, info)` returns."""

    class _TestOperator(operator_cls):  # type: ignore[valid-type, misc]
        def train_epoch(self, iterator: Any, info: Any = None, **_: Any) -> Any:
            function = self.config.get("custom_func")
            return function(self, iterator, info) if callable(function) else {"done": 1}

        def validate(self, val_iterator: Any, info: Any = None) -> Any:
            return self.train_epoch(val_iterator, info)

    return _TestOperator


def get_test_metrics_operator(operator_cls: type[TrainingOperator]) -> type[TrainingOperator]:
    """Make a subclass whose batches add known metrics: the values of `config["scores"]` and
    `config["val_scores"]`, one for each batch and divided by its number of samples, under the name
    `config["key"]`."""

    class _TestMetricsOperator(operator_cls):  # type: ignore[valid-type, misc]
        def setup(self, config: dict[str, Any]) -> None:
            super().setup(config)
            self.scores, self.val_scores = list(config["scores"]), list(config["val_scores"])
            self.key = config["key"]

        def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            metrics: dict[str, Any] = super().train_batch(batch, batch_info)
            return {**metrics, self.key: self.scores.pop(0) / metrics[NUM_SAMPLES]}

        def validate_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
            metrics: dict[str, Any] = super().validate_batch(batch, batch_info)
            return {**metrics, self.key: self.val_scores.pop(0) / metrics[NUM_SAMPLES]}

    return _TestMetricsOperator
