"""Names of Ray Train 1.x that have no effect here: importing one warns. Both."""

from __future__ import annotations

import warnings
from typing import Any

from raysgd.train.backends import CONFIGS
from raysgd.train.run.checkpoint_manager import CheckpointManager

# The value of each name, and what to do in place of using it.
NAMES: dict[str, tuple[Any, str]] = {
    "ENABLE_SHARE_CUDA_VISIBLE_DEVICES_ENV": (
        "TRAIN_ENABLE_SHARE_CUDA_VISIBLE_DEVICES",
        "set share_cuda_visible_devices in the class of the backend",
    ),
    "TRAIN_ENABLE_WORKER_SPREAD_ENV": (
        "TRAIN_ENABLE_WORKER_SPREAD",
        "workers are always spread over the nodes, and the variable is not read",
    ),
    "TUNE_CHECKPOINT_FILE_NAME": (
        "checkpoint",
        "checkpoints reach Tune by themselves; open them with Checkpoint.to_dict()",
    ),
    "TuneCheckpointManager": (
        CheckpointManager,
        "checkpoints reach Tune by themselves; otherwise, use CheckpointManager",
    ),
    "BACKEND_NAME_TO_CONFIG_CLS_NAME": (
        {name: each.__name__ for name, each in CONFIGS.items()},
        "changing it adds no backend: pass a BackendConfig as backend, or call get_backend_config_cls(name)",
    ),
    "RayDataset": (Any, "use ray.data.Dataset in annotations"),
}


def __getattr__(name: str) -> Any:
    if name not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value, instead = NAMES[name]
    warnings.warn(f"{name} of Ray Train 1.x has no effect in raysgd: {instead}", stacklevel=3)
    return value
