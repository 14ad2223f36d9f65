"""raysgd: train a model that you describe as a class, on machines that come and go.

Importing this package imports neither torch, tensorflow, horovod nor ray; each comes with the first name that needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from raysgd.config import ElasticConfig
from raysgd.core.policy import Recovery
from raysgd.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    HangError,
    NotActiveError,
    OutOfStepError,
    RaysgdError,
    ResourceError,
    TrainerBusyError,
    TrainingFailedError,
    WorkerStartError,
)
from raysgd.version import __version__

if TYPE_CHECKING:
    from raysgd.tf.trainer import TFTrainer
    from raysgd.torch.creators import CreatorOperator
    from raysgd.torch.operator import TrainingOperator
    from raysgd.torch.options import TrainingOptions
    from raysgd.torch.trainer import TorchTrainer

__all__ = [
    "CheckpointError",
    "ClusterError",
    "ConfigError",
    "CreatorOperator",
    "ElasticConfig",
    "HangError",
    "NotActiveError",
    "OutOfStepError",
    "RaysgdError",
    "Recovery",
    "ResourceError",
    "TFTrainer",
    "TorchTrainer",
    "TrainerBusyError",
    "TrainingFailedError",
    "TrainingOperator",
    "TrainingOptions",
    "WorkerStartError",
    "__version__",
]

# name -> (module, the framework it needs, the extra that installs it)
_LAZY = {
    "TorchTrainer": ("raysgd.torch.trainer", "torch", "torch"),
    "TrainingOperator": ("raysgd.torch.operator", "torch", "torch"),
    "TrainingOptions": ("raysgd.torch.options", "torch", "torch"),
    "CreatorOperator": ("raysgd.torch.creators", "torch", "torch"),
    "TFTrainer": ("raysgd.tf.trainer", "tensorflow", "tensorflow"),
}


def __getattr__(name: str) -> Any:
    if name == "PyTorchTrainer":
        raise DeprecationWarning("PyTorchTrainer is called TorchTrainer: from raysgd import TorchTrainer")
    if name not in _LAZY:
        raise AttributeError(f"module 'raysgd' has no attribute {name!r}")
    module, framework, extra = _LAZY[name]
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != framework:
            raise
        raise ImportError(f"raysgd.{name} needs {framework}: pip install 'raysgd[{extra}]'") from error


def __dir__() -> list[str]:
    return sorted(__all__)
