"""A Trainer of transformers in a training function: prepared, and with its checkpoints reported.
Worker.

    from raysgd.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer

    def train_func():
        trainer = transformers.Trainer(model, TrainingArguments(...), train_dataset=data)
        trainer.add_callback(RayTrainReportCallback())
        prepare_trainer(trainer).train()
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerCallback

from raysgd.errors import ConfigError
from raysgd.train.checkpoint import Checkpoint
from raysgd.train.huggingface.elastic import Elastic
from raysgd.train.session_functions import report, world_rank, world_size

__all__ = ["Elastic", "RayTrainReportCallback", "prepare_trainer"]


def prepare_trainer(trainer: Any, elastic: bool = True, seed: int | None = None) -> Any:
    """Let the `trainer` continue with the next batch after worker failures, and return it.

    Its class becomes a subclass of its own with `Elastic` before it. With `elastic=False`, and for
    batches of Ray Data (`shard.iter_torch_batches()` as `train_dataset`), the function starts again
    from the newest checkpoint after a worker failure.

    With a `seed`, random numbers of the model belong to the place in the data, so that dropout is
    equal for any number of workers. They differ from those of a Trainer under torchrun.
    """
    if trainer.args.world_size != world_size():
        raise ConfigError(
            f"the TrainingArguments are for {trainer.args.world_size} processes, and {world_size()} workers run this function, which would "
            "train one model each: create them in the training function, where the process group is, and with use_cpu=True on CPUs"
        )
    kind, reads = type(trainer), is_ray_data(trainer.train_dataset)
    if isinstance(trainer, Elastic) and (reads or not elastic):
        raise ConfigError(
            f"{kind.__name__} is elastic, which cannot be switched off for an object, and is not for batches of Ray Data: create the "
            "Trainer from a class without Elastic"
        )
    added = [each for each, wanted in ((Elastic, elastic and not reads), (ReadsRayData, True)) if wanted]
    bases = tuple(each for each in added if not issubclass(kind, each))
    if bases:
        trainer.__class__ = type(f"Prepared{kind.__name__}", (*bases, kind), {})
    if seed is not None:
        trainer.seed_of_parts = seed
    return trainer


class RayTrainReportCallback(TrainerCallback):  # type: ignore[misc]
    """Reports each checkpoint that the Trainer saves, with the newest value of everything that it
    has logged. The folder `checkpoint` of a reported checkpoint is what the Trainer has saved, for
    `train(resume_from_checkpoint=...)`."""

    CHECKPOINT_NAME = "checkpoint"

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called after the Trainer has saved a checkpoint. Rank 0 reports the files."""
        metrics = {name: value for logs in state.log_history for name, value in logs.items()}
        if dist.is_initialized():
            dist.barrier()  # each rank writes one of the files
        saved = Path(args.output_dir, f"checkpoint-{state.global_step}")
        if world_rank() != 0 or not saved.is_dir():
            report(metrics)
            return
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(saved, Path(folder, self.CHECKPOINT_NAME))
            report(metrics, checkpoint=Checkpoint.from_directory(folder))


class RayTorchIterableDataset(IterableDataset[Any]):
    """Yields the batches of a Ray Dataset."""

    def __init__(self, data_iterable: Any) -> None:
        self.data_iterable = data_iterable

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data_iterable)


class ReadsRayData:
    """Goes before a Trainer class, and reads batches of Ray Data as they are."""

    train_dataset: Any
    eval_dataset: Any

    def get_train_dataloader(self) -> DataLoader[Any]:
        inner: Any = super()
        return loader_of(self.train_dataset) if is_ray_data(self.train_dataset) else inner.get_train_dataloader()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(chosen, str) and isinstance(self.eval_dataset, dict):
            chosen = self.eval_dataset[chosen]
        inner: Any = super()
        return loader_of(chosen) if is_ray_data(chosen) else inner.get_eval_dataloader(eval_dataset)


def is_ray_data(batches: Any) -> bool:
    return type(batches).__module__.startswith("ray.data.")


def loader_of(batches: Any) -> DataLoader[Any]:
    return DataLoader(RayTorchIterableDataset(batches), batch_size=1, collate_fn=lambda items: items[0])
