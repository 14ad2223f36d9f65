"""A script that trains with `fit` and automatic checkpoints: `python resuming.py FOLDER EVERY EPOCHS`. A test kills it, and
starts it again."""

import hashlib
import os
import sys
import time
from typing import Any

import ray
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import AutoCheckpoint, TorchTrainer, TrainingOperator
from raysgd.callbacks import Callback, Underway


class Digits(TrainingOperator):
    """Draws random numbers for the order, in the model, and on each rank."""

    def setup(self, config: dict[str, Any]) -> None:
        x = torch.randn(160, 4)
        model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.Adam(model.parameters(), lr=0.01), criterion=nn.MSELoss()
        )
        data = TensorDataset(x, x.sum(dim=1, keepdim=True))
        self.register_data(
            train_loader=DataLoader(data, batch_size=4, shuffle=True), validation_loader=DataLoader(data, batch_size=40)
        )

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.01)
        x, y = batch
        return super().train_batch((x + 0.1 * torch.randn_like(x), y), batch_info)


class Saying(Callback):
    """Says how many batches have been trained, since the start of training."""

    def on_progress(self, now: Underway) -> None:
        print("STEP", now.progress.step, flush=True)


def main() -> None:
    folder, every, epochs = sys.argv[1], eval(sys.argv[2]), int(sys.argv[3])
    ray.init(address=os.environ["RAYSGD_TEST_CLUSTER"], log_to_driver=False, logging_level="ERROR")
    with TorchTrainer(
        training_operator_cls=Digits,
        num_workers=2,
        use_gpu=False,
        checkpoints=AutoCheckpoint(path=folder, every=every, best="val_loss"),
        resume="auto",
        seed=5,
        callbacks=[Saying()],
    ) as trainer:
        print("RESUMED", trainer.resumed_from, flush=True)
        print("WORKERS", *trainer.apply_all_workers(os.getpid), flush=True)
        history = trainer.fit(epochs)
        weights = nn.utils.parameters_to_vector(trainer.get_model().parameters()).detach()
        losses = [row["val_loss"] for row in history.of("validate")]
        print("DONE", hashlib.sha256(weights.numpy().tobytes()).hexdigest(), *losses, flush=True)


if __name__ == "__main__":
    main()
