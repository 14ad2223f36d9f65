"""`RayTrainReportCallback`: a report with a checkpoint after each epoch. Worker."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from raysgd.train.checkpoint import Checkpoint
from raysgd.train.lightning.package import imported
from raysgd.train.session_functions import report, world_rank


class RayTrainReportCallback(imported(".callbacks").Callback):  # type: ignore[misc]
    """Reports the trainer's `callback_metrics` with `epoch` and `step` at the end of each training
    epoch, and Lightning's checkpoint of that moment in a file of the name `CHECKPOINT_NAME`."""

    CHECKPOINT_NAME = "checkpoint.ckpt"

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        metrics |= {"epoch": trainer.current_epoch, "step": trainer.global_step}
        with tempfile.TemporaryDirectory() as folder:
            trainer.save_checkpoint(Path(folder, self.CHECKPOINT_NAME), weights_only=False)
            report(metrics, checkpoint=Checkpoint.from_directory(folder) if world_rank() == 0 else None)
