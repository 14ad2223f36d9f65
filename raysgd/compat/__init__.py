"""Old module paths and names, for code that was written for RaySGD, Ray Train 1.x or AIR. Nothing in raysgd uses them. Both.

Python finds no file for these modules. `raysgd.core.lazy.OldModules` creates them from this table when they are imported:
{old module: {where its names are defined: the names}}, with "*" for all public names, and old=new for a new name.
"""

from __future__ import annotations

from importlib import import_module

__all__ = ["MODULES", "homes_of"]

BACKENDS = "Backend BackendConfig BackendExecutor"
ERRORS = "InactiveWorkerGroupError TrainBackendError TrainingWorkerError"
CONFIGS = "Checkpoint CheckpointConfig FailureConfig Result RunConfig ScalingConfig"

MODULES: dict[str, dict[str, str]] = {
    # RaySGD
    "raysgd.utils": {"raysgd.compat.utils": "*"},
    "raysgd.torch.constants": {"raysgd.compat.torch_constants": "*"},
    "raysgd.torch.resnet": {"raysgd.operators.resnet": "*"},
    "raysgd.torch.torch_trainer": {"raysgd.torch": "BaseTorchTrainable TorchTrainer"},
    "raysgd.torch.training_operator": {"raysgd.compat.training_operator": "*"},
    "raysgd.torch.utils": {"raysgd.compat.process_group": "*"},
    "raysgd.tf.tf_trainer": {"raysgd.tf": "TFTrainable TFTrainer"},
    # Ray Train 1.x
    "raysgd.train.backend": {"raysgd.train": f"{BACKENDS} {ERRORS}"},
    "raysgd.train.backends.backend": {"raysgd.train": BACKENDS},
    "raysgd.train.backends.horovod": {"raysgd.train": "HorovodConfig"},
    "raysgd.train.backends.tensorflow": {"raysgd.train": "TensorflowConfig"},
    "raysgd.train.backends.torch": {"raysgd.train": "TorchConfig"},
    "raysgd.train.callbacks.callback": {"raysgd.train": "TrainingCallback"},
    "raysgd.train.callbacks.logging": {
        "raysgd.train.callbacks": "JsonLoggerCallback MLflowLoggerCallback TBXLoggerCallback"
    },
    "raysgd.train.callbacks.print": {"raysgd.train.callbacks": "PrintCallback"},
    "raysgd.train.callbacks.profile": {"raysgd.train.callbacks": "TorchTensorboardProfilerCallback"},
    "raysgd.train.callbacks.results_preprocessors": {"raysgd.compat.without_effect": "*"},
    "raysgd.train.constants": {
        "raysgd.compat.train_constants": "*",
        "raysgd.compat.without_effect": "ENABLE_SHARE_CUDA_VISIBLE_DEVICES_ENV TRAIN_ENABLE_WORKER_SPREAD_ENV "
        "TUNE_CHECKPOINT_FILE_NAME",
    },
    "raysgd.train.session": {"raysgd.compat.session": "*"},
    "raysgd.train.utils": {"raysgd.compat.train_utils": "*", "raysgd.compat.without_effect": "RayDataset"},
    # AIR
    "raysgd.air": {"raysgd.train": f"{CONFIGS} session"},
    "raysgd.air.checkpoint": {"raysgd.train": "Checkpoint"},
    "raysgd.air.config": {"raysgd.train": "CheckpointConfig FailureConfig RunConfig ScalingConfig"},
    "raysgd.air.result": {"raysgd.train": "Result"},
    "raysgd.air.session": {"raysgd.compat.session": "*"},
    "raysgd.train.base_trainer": {
        "raysgd.errors": "TrainingFailedError",
        "raysgd.train": "BaseTrainer=DataParallelTrainer",
    },
    "raysgd.train.horovod.config": {"raysgd.train": "HorovodConfig"},
    "raysgd.train.horovod.horovod_trainer": {"raysgd.train.horovod": "HorovodTrainer"},
    "raysgd.train.tensorflow.config": {"raysgd.train": "TensorflowConfig"},
    "raysgd.train.tensorflow.tensorflow_trainer": {"raysgd.train.tensorflow": "TensorflowTrainer"},
    "raysgd.train.torch.config": {"raysgd.train": "TorchConfig"},
    "raysgd.train.torch.torch_trainer": {"raysgd.train.torch": "TorchTrainer"},
    "raysgd.train.context": {"raysgd.train.functions": "TrainContext"},
    "raysgd.train.data_parallel_trainer": {"raysgd.train": "DataParallelTrainer"},
}


def homes_of(module: str) -> dict[str, str]:
    """Return where each name of an old module is defined, for `raysgd.core.lazy.load`."""
    homes = {}
    for home, names in MODULES[module].items():
        for name in import_module(home).__all__ if names == "*" else names.split():
            old, _, new = name.partition("=")
            homes[old] = f"{home}:{new or old}"
    return homes
