"""Old module paths and names, for code that was written for RaySGD, Ray Train 1.x or AIR. Nothing
in raysgd uses them. Both.

Python finds no file for these modules. `raysgd.core.lazy.OldModules` creates them from this table
when they are imported: {old module: {where its names are defined: the names}}, with old=new for a
new name. Names at home in REFUSED raise an error that says what to do instead.
"""

from __future__ import annotations

from raysgd.core.lazy import REFUSED

__all__ = ["MODULES", "homes_of"]

CONSTANTS = "BATCH_COUNT BATCH_SIZE NUM_SAMPLES NUM_STEPS SCHEDULER_STEP SCHEDULER_STEP_BATCH SCHEDULER_STEP_EPOCH "
CONSTANTS += "SCHEDULER_STEP_MANUAL USE_FP16 VALID_SCHEDULER_STEP"
BACKENDS = "Backend BackendConfig BackendExecutor"
ERRORS = "InactiveWorkerGroupError TrainBackendError TrainingWorkerError"
CONFIGS = "Checkpoint CheckpointConfig FailureConfig Result RunConfig ScalingConfig"
SESSION = {
    "raysgd.train.session_functions": "get_checkpoint get_context get_dataset_shard load_checkpoint local_rank save_checkpoint world_rank "
    "world_size",
    "raysgd.train.run.executor": "TrainingResultType",
    "raysgd.compat.session": "get_experiment_name get_local_rank get_local_world_size get_metadata get_node_rank get_trial_dir "
    "get_trial_id get_trial_name get_trial_resources get_world_rank get_world_size report",
}

MODULES: dict[str, dict[str, str]] = {
    # RaySGD
    "raysgd.utils": {
        "raysgd.constants": "BATCH_COUNT BATCH_SIZE NUM_SAMPLES",
        "raysgd.core.measures.average_meters": "AverageMeter AverageMeterCollection",
        "raysgd.compat.utils": "check_for_failure find_free_port override",
        REFUSED: "TimerCollection TimerStat",
    },
    "raysgd.torch.constants": {
        "raysgd.constants": CONSTANTS,
        "raysgd.compat.constants": "NCCL_TIMEOUT_S SGD_PLACEMENT_GROUP_TIMEOUT_S",
    },
    "raysgd.torch.distributed_torch_runner": {REFUSED: "DistributedTorchRunner LocalDistributedRunner"},
    "raysgd.torch.ptl_operator": {REFUSED: "LightningOperator"},
    "raysgd.torch.resnet": {"raysgd.operators.resnet": "ResNet ResNet18 ResNet34 ResNet50 ResNet101 ResNet152"},
    "raysgd.torch.torch_dataset": {REFUSED: "TorchIterableDataset TorchMLDataset"},
    "raysgd.data.dataset": {REFUSED: "Dataset"},
    "raysgd.torch.torch_runner": {REFUSED: "TorchRunner"},
    "raysgd.torch.torch_trainer": {"raysgd.torch": "BaseTorchTrainable TorchTrainer"},
    "raysgd.torch.training_operator": {
        "raysgd.torch": "CreatorOperator TrainingOperator",
        "raysgd.compat.torch_functions": "get_test_metrics_operator get_test_operator",
        "torch.cuda": "amp",
    },
    "raysgd.torch.utils": {"raysgd.compat.torch_functions": "setup_address setup_process_group"},
    "raysgd.torch.worker_group": {
        REFUSED: "DeactivatedWorkerGroup LocalWorkerGroup RESIZE_COOLDOWN_S RemoteWorkerGroup"
    },
    "raysgd.tf.tf_dataset": {REFUSED: "TFMLDataset"},
    "raysgd.tf.tf_runner": {REFUSED: "TFRunner"},
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
    "raysgd.train.callbacks.results_preprocessors": {
        "raysgd.compat.results_preprocessors": "AverageResultsPreprocessor ExcludedKeysResultsPreprocessor "
        "IndexedResultsPreprocessor MaxResultsPreprocessor ResultsPreprocessor SequentialResultsPreprocessor "
        "WeightedAverageResultsPreprocessor"
    },
    "raysgd.train.constants": {
        "raysgd.callbacks.base": "PYTORCH_PROFILER_KEY=TRACES",
        "raysgd.environment": "TRAIN_PLACEMENT_GROUP_TIMEOUT_S_ENV=FUNCTION_START_LIMIT",
        "raysgd.ray_data.datasets": "TRAIN_DATASET_KEY=DEFAULT_NAME",
        "raysgd.train.run.rounds": "ENABLE_DETAILED_AUTOFILLED_METRICS_ENV=DETAILED",
        "raysgd.train.settings": "TIMESTAMP",
        "raysgd.compat.constants": "ALL_RESERVED_KEYS BASIC_AUTOFILLED_KEYS DATE DEFAULT_RESULTS_DIR DETAILED_AUTOFILLED_KEYS "
        "HOSTNAME NODE_IP PID TIME_THIS_ITER_S TIME_TOTAL_S TRAINING_ITERATION",
        "raysgd.compat.without_effect": "ENABLE_SHARE_CUDA_VISIBLE_DEVICES_ENV TRAIN_ENABLE_WORKER_SPREAD_ENV "
        "TUNE_CHECKPOINT_FILE_NAME",
    },
    "raysgd.train.session": {
        **SESSION,
        REFUSED: "Session TrainingResult get_session init_session shutdown_session",
    },
    "raysgd.train.horovod": {"raysgd.train": "HorovodConfig HorovodTrainer"},
    "raysgd.train.trainer": {
        "raysgd.train": "BaseTrainer Trainer TrainingIterator",
        "raysgd.train.backends": "get_backend_config_cls",
        "raysgd.compat.without_effect": "BACKEND_NAME_TO_CONFIG_CLS_NAME",
        REFUSED: "TrainWorkerGroup",
    },
    "raysgd.train.utils": {
        "raysgd.compat.utils": "check_for_failure construct_path construct_train_func get_address_and_port update_env_vars",
        "raysgd.compat.without_effect": "RayDataset",
    },
    "raysgd.train.worker_group": {"raysgd.train": "WorkerGroup", REFUSED: "Worker WorkerMetadata"},
    # AIR
    "raysgd.air": {"raysgd.train": f"{CONFIGS} session", REFUSED: "DataBatchType DatasetConfig"},
    "raysgd.air.checkpoint": {"raysgd.train": "Checkpoint"},
    "raysgd.air.config": {"raysgd.train": "CheckpointConfig FailureConfig RunConfig ScalingConfig"},
    "raysgd.air.result": {"raysgd.train": "Result"},
    "raysgd.air.session": SESSION,
    "raysgd.train.batch_predictor": {REFUSED: "BatchPredictor"},
    "raysgd.train.base_trainer": {
        "raysgd.errors": "TrainingFailedError",
        "raysgd.train": "BaseTrainer=DataParallelTrainer",
    },
    "raysgd.train.horovod.config": {"raysgd.train": "HorovodConfig"},
    "raysgd.train.horovod.horovod_trainer": {"raysgd.train": "HorovodTrainer"},
    "raysgd.train.tensorflow.config": {"raysgd.train": "TensorflowConfig"},
    "raysgd.train.tensorflow.tensorflow_trainer": {"raysgd.train.tensorflow": "TensorflowTrainer"},
    "raysgd.train.torch.config": {"raysgd.train": "TorchConfig"},
    "raysgd.train.torch.torch_trainer": {"raysgd.train.torch": "TorchTrainer"},
    "raysgd.train.context": {"raysgd.train.session_functions": "TrainContext"},
    "raysgd.train.data_parallel_trainer": {"raysgd.train": "DataParallelTrainer"},
}


def homes_of(module: str) -> dict[str, str]:
    """Where each name of an old module is defined, for `raysgd.core.lazy.load`."""
    pairs = [(home, *name.partition("=")) for home, names in MODULES[module].items() for name in names.split()]
    return {old: f"{home}:{new or old}" for home, old, _, new in pairs}
