"""The class API for TensorFlow: RaySGD's names and an operator, loaded on first use. Both."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysgd.core.lazy import lazy_names

if TYPE_CHECKING:
    from raysgd.tf.operator import TrainingOperator
    from raysgd.tf.trainer import TFTrainer

__all__ = ["TFTrainable", "TFTrainer", "TrainingOperator"]

_HOMES = {
    "TFTrainer": "raysgd.tf.trainer",
    "TrainingOperator": "raysgd.tf.operator",
    "TFTrainable": "raysgd.tune",
}
__getattr__, __dir__ = lazy_names("raysgd.tf", _HOMES, __all__)
