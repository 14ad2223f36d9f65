"""What recording.py records: three workers train on digits, and one of them is killed in the middle of an epoch."""

import logging
import os
import signal
import threading
import time

import ray
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator

logging.basicConfig(level=logging.WARNING, format="%(message)s")


class Digits(TrainingOperator):
    def setup(self, config):
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.05), criterion=nn.CrossEntropyLoss()
        )
        images, labels = load_digits(return_X_y=True)
        digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
        self.register_data(train_loader=DataLoader(digits, batch_size=8, shuffle=True))

    def train_batch(self, batch, batch_info):
        time.sleep(0.04)  # so that an epoch takes a few seconds
        return super().train_batch(batch, batch_info)


def kill(process):
    print(f"$ kill -9 {process}", flush=True)
    os.kill(process, signal.SIGKILL)


ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
with TorchTrainer(training_operator_cls=Digits, num_workers=3) as trainer:
    for epoch in range(1, 12):
        if epoch == 2:
            victim = trainer.apply_all_workers(os.getpid)[1]
            threading.Timer(1.5, kill, [victim]).start()
        start = time.monotonic()
        result = trainer.train()
        print(
            f"epoch {epoch}: {result['num_samples']} samples, loss {result['train_loss']:.3f}, "
            f"{trainer.world_size} workers, {time.monotonic() - start:.1f} s",
            flush=True,
        )
        if epoch > 2 and trainer.world_size == 3:  # the replacement has joined
            break
