"""The class API for TensorFlow: RaySGD's names of `ray.util.sgd.tf` and an operator, loaded on first use. Both."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raysgd.tf.operator import TrainingOperator
    from raysgd.tf.trainer import TFTrainer
    from raysgd.tune import TFTrainable

__all__ = ["TFTrainable", "TFTrainer", "TrainingOperator"]

_HOMES = {
    "TFTrainer": "raysgd.tf.trainer",
    "TrainingOperator": "raysgd.tf.operator",
    "TFTrainable": "raysgd.tune",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'raysgd.tf' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "tensorflow":
            raise
        raise ImportError(f"raysgd.tf.{name} needs tensorflow: pip install 'raysgd[tensorflow]'") from error


def __dir__() -> list[str]:
    return sorted(__all__)
