"""raysgd: elastic distributed training on Ray. Both.

Importing this package imports neither torch, tensorflow, horovod nor ray. The first name that needs
one imports it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from raysgd.config import ElasticConfig
from raysgd.core.decisions.policy import Recovery
from raysgd.core.lazy import REFUSED, OldModules, lazy_names
from raysgd.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    DivergenceError,
    HangError,
    NonFiniteError,
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
    from raysgd.core.measures.speed import RankSpeed, Speed
    from raysgd.engine.engine import shutdown_all
    from raysgd.replica.seeding import seed_for
    from raysgd.tf.trainer import TFTrainer as TFTrainer
    from raysgd.torch.creators import CreatorOperator
    from raysgd.torch.operator import TrainingOperator
    from raysgd.torch.options import TrainingOptions
    from raysgd.torch.trainer import TorchTrainer
    from raysgd.trainer.auto_checkpoint import AutoCheckpoint

# What `from raysgd import *` imports: not TFTrainer, so that a script for PyTorch does not load TensorFlow.
__all__ = [
    "AutoCheckpoint",
    "CheckpointError",
    "ClusterError",
    "ConfigError",
    "CreatorOperator",
    "DivergenceError",
    "ElasticConfig",
    "HangError",
    "NonFiniteError",
    "NotActiveError",
    "OutOfStepError",
    "RankSpeed",
    "RaysgdError",
    "Recovery",
    "ResourceError",
    "Speed",
    "TorchTrainer",
    "TrainerBusyError",
    "TrainingFailedError",
    "TrainingOperator",
    "TrainingOptions",
    "WorkerStartError",
    "__version__",
    "seed_for",
    "shutdown_all",
]

_HOMES = {
    "TorchTrainer": "raysgd.torch.trainer",
    "TrainingOperator": "raysgd.torch.operator",
    "TrainingOptions": "raysgd.torch.options",
    "CreatorOperator": "raysgd.torch.creators",
    "TFTrainer": "raysgd.tf.trainer",
    "Speed": "raysgd.core.measures.speed",
    "RankSpeed": "raysgd.core.measures.speed",
    "shutdown_all": "raysgd.engine.engine",
    "AutoCheckpoint": "raysgd.trainer.auto_checkpoint",
    "PyTorchTrainer": REFUSED,
    "seed_for": "raysgd.replica.seeding",
}

if not any(isinstance(finder, OldModules) for finder in sys.meta_path):
    sys.meta_path.append(OldModules("raysgd.compat.import_paths"))

__getattr__, __dir__ = lazy_names("raysgd", _HOMES, __all__)
