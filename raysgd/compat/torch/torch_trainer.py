"""RaySGD's module of `TorchTrainer` and `BaseTorchTrainable`. Driver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raysgd.torch.trainer import TorchTrainer as TorchTrainer

if TYPE_CHECKING:
    from raysgd.tune import BaseTorchTrainable

__all__ = ["BaseTorchTrainable", "TorchTrainer"]


def __getattr__(name: str) -> Any:
    if name != "BaseTorchTrainable":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from raysgd.tune import BaseTorchTrainable  # needs Ray Tune

    return BaseTorchTrainable


def __dir__() -> list[str]:
    return __all__
