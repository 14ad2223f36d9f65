"""The class API for PyTorch: RaySGD's names of `ray.util.sgd.torch`, each loaded on first use. Both."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raysgd.torch.creators import CreatorOperator
    from raysgd.torch.operator import TrainingOperator
    from raysgd.torch.trainer import TorchTrainer

__all__ = ["BaseTorchTrainable", "CreatorOperator", "TorchTrainer", "TrainingOperator"]

_HOMES = {
    "TorchTrainer": "raysgd.torch.trainer",
    "TrainingOperator": "raysgd.torch.operator",
    "CreatorOperator": "raysgd.torch.creators",
    "BaseTorchTrainable": "raysgd.tune",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'raysgd.torch' has no attribute {name!r}")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise ImportError(f"raysgd.torch.{name} needs torch: pip install 'raysgd[torch]'") from error


def __dir__() -> list[str]:
    return sorted(__all__)
