"""RaySGD's module of `TFTrainer` and `TFTrainable`. Driver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raysgd.tf.trainer import TFTrainer as TFTrainer

if TYPE_CHECKING:
    from raysgd.tune import TFTrainable

__all__ = ["TFTrainable", "TFTrainer"]


def __getattr__(name: str) -> Any:
    if name != "TFTrainable":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from raysgd.tune import TFTrainable  # needs Ray Tune

    return TFTrainable


def __dir__() -> list[str]:
    return __all__
