"""The class API for TensorFlow: RaySGD's names of `ray.util.sgd.tf` and an operator, loaded on first use. Both."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from raysgd.core.lazy import lazy_names

if TYPE_CHECKING:
    from raysgd.tf.operator import TrainingOperator
    from raysgd.tf.trainer import TFTrainer
    from raysgd.tune import TFTrainable

__all__ = ["TFTrainable", "TFTrainer", "TrainingOperator"]

# Modules that only RaySGD had are found in `raysgd.compat.tf`.
__path__ = [*__path__, str(Path(__file__).parent.with_name("compat") / "tf")]

_HOMES = {
    "TFTrainer": "raysgd.tf.trainer",
    "TrainingOperator": "raysgd.tf.operator",
    "TFTrainable": "raysgd.tune",
}
__getattr__, __dir__ = lazy_names("raysgd.tf", _HOMES, __all__)
