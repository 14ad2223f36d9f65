"""The class API for PyTorch: RaySGD's `ray.util.sgd.torch`, loaded on first use. Both."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raysgd.core.lazy import lazy_names

if TYPE_CHECKING:
    from raysgd.torch.creators import CreatorOperator
    from raysgd.torch.operator import TrainingOperator
    from raysgd.torch.options import TrainingOptions
    from raysgd.torch.trainer import TorchTrainer

__all__ = ["BaseTorchTrainable", "CreatorOperator", "TorchTrainer", "TrainingOperator", "TrainingOptions"]

_HOMES = {
    "TorchTrainer": "raysgd.torch.trainer",
    "TrainingOperator": "raysgd.torch.operator",
    "TrainingOptions": "raysgd.torch.options",
    "CreatorOperator": "raysgd.torch.creators",
    "BaseTorchTrainable": "raysgd.tune",
}
__getattr__, __dir__ = lazy_names("raysgd.torch", _HOMES, __all__)
