"""Names of RaySGD, Ray Train 1.x and AIR that raysgd does not have: importing one raises an error
that says what to do instead. Both."""

from __future__ import annotations

__all__ = ["NAMES"]

# What to do instead, and the names.
NAMES: dict[str, str] = {
    "use TorchTrainer": "PyTorchTrainer",
    "runners are internal, and a trainer has what scripts need: world_size, recoveries, resize(n), apply_all_operators(f)": "TorchRunner "
    "DistributedTorchRunner LocalDistributedRunner RemoteWorkerGroup LocalWorkerGroup DeactivatedWorkerGroup TFRunner",
    "there is no fixed pause between changes of workers": "RESIZE_COOLDOWN_S",
    "use TrainingOperator.from_ptl(YourLightningModule)": "LightningOperator",
    "pass a Ray Dataset to register_data(train_loader=...)": "TorchIterableDataset TorchMLDataset",
    "use a tf.data.Dataset": "TFMLDataset",
    "use self.timers in an operator: `with self.timers.record(name):`": "TimerStat TimerCollection",
    "call download_func and transform in the __getitem__ of a torch data set, and register a DataLoader of it": "Dataset",
    "use train.torch.prepare_model, prepare_optimizer and backward": "TorchAccelerator",
    "a session exists only while a training function runs; call the functions of raysgd.train in it": "Session TrainingResult "
    "get_session init_session shutdown_session",
    "use start(train_cls=...), and then execute(...), which calls a function with each worker's object": "TrainWorkerGroup",
    "ask the workers themselves, for example with worker_group.execute(os.getpid)": "Worker WorkerMetadata",
    'use dataset_config={"train": {"split": True}}, or a raysgd.train.DataConfig': "DatasetConfig",
    "a batch may be of any type: use Any in annotations": "DataBatchType",
    "leave it out, because storage_path may be a URI": "SyncConfig",
    'use Checkpoint.from_dict({"model": ...}) with the state or the weights of the model': "TorchCheckpoint TensorflowCheckpoint",
    "predict with map_batches of Ray Data": "TorchPredictor TensorflowPredictor BatchPredictor",
}


def __getattr__(name: str) -> None:
    for instead, names in NAMES.items():
        if name in names.split():
            raise ImportError(f"raysgd has no {name}: {instead}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
