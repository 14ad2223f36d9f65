"""Training functions on elastic workers: `Trainer(backend="torch", num_workers=2).run(train_func)`. Both.

Functions call `train.report`, `train.save_checkpoint`, `train.world_rank` and so on, and `train.torch.prepare_model`.
Importing this package imports neither torch, tensorflow, horovod nor ray; the names that need them are lazy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from raysgd.ray_data.datasets import DEFAULT_NAME as TRAIN_DATASET_KEY
from raysgd.ray_data.datasets import DataConfig
from raysgd.train.backends import Backend, BackendConfig, HorovodConfig, TensorflowConfig, TorchConfig
from raysgd.train.callbacks import SGDCallback, TrainingCallback
from raysgd.train.checkpoint import Checkpoint
from raysgd.train.elastic_state import elastic
from raysgd.train.errors import (
    InactiveWorkerGroupError,
    OutsideRunError,
    ReportMismatchError,
    SGDBackendError,
    TrainBackendError,
    TrainingWorkerError,
)
from raysgd.train.fit.result import Result
from raysgd.train.fit.settings import CheckpointConfig, CheckpointStrategy, FailureConfig, RunConfig, ScalingConfig
from raysgd.train.functions import (
    get_checkpoint,
    get_context,
    get_dataset_shard,
    load_checkpoint,
    local_rank,
    report,
    save_checkpoint,
    world_rank,
    world_size,
)

if TYPE_CHECKING:
    from raysgd.train import session, tensorflow, torch
    from raysgd.train.executor import BackendExecutor
    from raysgd.train.fit.trainer import DataParallelTrainer
    from raysgd.train.frameworks import HorovodTrainer, TensorflowTrainer, TorchTrainer
    from raysgd.train.iterator import SGDIterator, TrainingIterator
    from raysgd.train.trainer import Trainer
    from raysgd.train.worker_group import WorkerGroup

__all__ = [
    "TRAIN_DATASET_KEY",
    "Backend",
    "BackendConfig",
    "BackendExecutor",
    "Checkpoint",
    "CheckpointConfig",
    "CheckpointStrategy",
    "DataConfig",
    "DataParallelTrainer",
    "FailureConfig",
    "HorovodConfig",
    "HorovodTrainer",
    "InactiveWorkerGroupError",
    "OutsideRunError",
    "ReportMismatchError",
    "Result",
    "RunConfig",
    "SGDBackendError",
    "SGDCallback",
    "SGDIterator",
    "ScalingConfig",
    "TensorflowConfig",
    "TensorflowTrainer",
    "TorchConfig",
    "TorchTrainer",
    "TrainBackendError",
    "Trainer",
    "TrainingCallback",
    "TrainingIterator",
    "TrainingWorkerError",
    "WorkerGroup",
    "elastic",
    "get_checkpoint",
    "get_context",
    "get_dataset_shard",
    "load_checkpoint",
    "local_rank",
    "report",
    "save_checkpoint",
    "session",
    "tensorflow",
    "torch",
    "world_rank",
    "world_size",
]

_LAZY = {
    "BackendExecutor": "executor",
    "DataParallelTrainer": "fit.trainer",
    "HorovodTrainer": "frameworks",
    "SGDIterator": "iterator",
    "TensorflowTrainer": "frameworks",
    "TorchTrainer": "frameworks",
    "Trainer": "trainer",
    "TrainingIterator": "iterator",
    "WorkerGroup": "worker_group",
}
_MODULES = ("session", "tensorflow", "torch")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"raysgd.train.{_LAZY[name]}"), name)
    if name in _MODULES:
        try:
            return import_module(f"raysgd.train.{name}")
        except ImportError as error:
            if (error.name or "").partition(".")[0] != name:
                raise
            raise ImportError(f"raysgd.train.{name} needs {name}: pip install 'raysgd[{name}]'") from error
    raise AttributeError(f"module 'raysgd.train' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
