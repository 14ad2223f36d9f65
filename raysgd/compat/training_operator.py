"""RaySGD's module of operators: `TrainingOperator`, `CreatorOperator`, and two operators for tests. Both."""

from __future__ import annotations

from typing import Any

from raysgd.constants import NUM_SAMPLES
from raysgd.torch.creators import CreatorOperator
from raysgd.torch.operator import TrainingOperator

__all__ = ["CreatorOperator", "TrainingOperator", "get_test_metrics_operator", "get_test_operator"]


def get_test_operator(operator_cls: type[TrainingOperator]) -> type[TrainingOperator]:
    """Return a subclass whose epochs and validations do nothing and return `{"done": 1}`, or what
    `config["custom_func"](operator, iterator, info)` returns."""

    class _TestOperator(operator_cls):  # type: ignore[valid-type, misc]
        def train_epoch(self, iterator: Any, info: Any = None, **_: Any) -> Any:
            function = self.config.get("custom_func")
            return function(self, iterator, info) if callable(function) else {"done": 1}

        def validate(self, val_iterator: Any, info: Any = None) -> Any:
            return self.train_epoch(val_iterator, info)

    return _TestOperator


def get_test_metrics_operator(operator_cls: type[TrainingOperator]) -> type[TrainingOperator]:
    """Return a subclass whose batches add known metrics: the values of `config["scores"]` and `config["val_scores"]`, one for
    each batch and divided by its number of samples, under the name `config["key"]`."""

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
