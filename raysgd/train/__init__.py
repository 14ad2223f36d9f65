"""Training functions on elastic workers: `Trainer(backend="torch", num_workers=2).run(train_func)`.
Both.

Functions call `train.report`, `train.save_checkpoint`, `train.world_rank` and so on, and
`train.torch.prepare_model`. Importing this package imports neither torch, tensorflow, horovod nor
ray; the names that need them are lazy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raysgd.core.lazy import REFUSED, lazy_names
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
from raysgd.train.session_functions import (
    get_checkpoint,
    get_context,
    get_dataset_shard,
    load_checkpoint,
    local_rank,
    once,
    report,
    save_checkpoint,
    world_rank,
    world_size,
)
from raysgd.train.settings import CheckpointConfig, CheckpointStrategy, FailureConfig, RunConfig, ScalingConfig

if TYPE_CHECKING:
    from raysgd.replica.seeding import seed_for
    from raysgd.train import tensorflow as tensorflow
    from raysgd.train import torch as torch
    from raysgd.train.fit.frameworks import HorovodTrainer, TensorflowTrainer, TorchTrainer
    from raysgd.train.fit.trainer import DataParallelTrainer
    from raysgd.train.run.driver import SGDIterator, TrainingIterator
    from raysgd.train.run.executor import BackendExecutor
    from raysgd.train.run.trainer import Trainer
    from raysgd.train.run.worker_group import WorkerGroup

    session: Any

# Not the modules `tensorflow` and `torch`, whose names would hide those that the user has imported.
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
    "once",
    "report",
    "save_checkpoint",
    "seed_for",
    "session",
    "world_rank",
    "world_size",
]

_HOMES = {
    "BackendExecutor": "raysgd.train.run.executor",
    "BaseTrainer": "raysgd.train.fit.trainer:DataParallelTrainer",  # AIR's name; it is not in `__all__`
    "DataParallelTrainer": "raysgd.train.fit.trainer",
    "HorovodTrainer": "raysgd.train.fit.frameworks",
    "SGDIterator": "raysgd.train.run.driver",
    "SyncConfig": REFUSED,
    "TensorflowTrainer": "raysgd.train.fit.frameworks",
    "TorchTrainer": "raysgd.train.fit.frameworks",
    "Trainer": "raysgd.train.run.trainer",
    "TrainingIterator": "raysgd.train.run.driver",
    "WorkerGroup": "raysgd.train.run.worker_group",
    "seed_for": "raysgd.replica.seeding",
    "session": "raysgd.train.session",
    "tensorflow": "raysgd.train.tensorflow",
    "torch": "raysgd.train.torch",
}
__getattr__, __dir__ = lazy_names("raysgd.train", _HOMES, __all__)
