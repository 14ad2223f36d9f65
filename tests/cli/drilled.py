"""Operators for `raysgd drill`: two without a fault, one that forgets, and one whose first rank has more than the others."""

import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TrainingOperator

SAMPLES, BATCH_SIZE = 480, 4
STEPS = 60  # of an epoch, with two workers


class Clean(TrainingOperator):
    """Has a state of its own, which it saves."""

    def setup(self, config: dict[str, Any]) -> None:
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=config.get("lr", 0.05), momentum=0.9)
        self.model, self.optimizer, self.criterion, *_ = self.register(
            models=model, optimizers=optimizer, criterion=nn.CrossEntropyLoss(), **self.schedulers(optimizer)
        )
        x = torch.randn(SAMPLES, 8)
        data = TensorDataset(x, (x.sum(dim=1) > 0).long())
        self.register_data(train_loader=DataLoader(data, batch_size=BATCH_SIZE, shuffle=True))
        self.batches = 0

    def schedulers(self, optimizer: Any) -> dict[str, Any]:
        return {}

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.02)
        self.batches += 1
        return super().train_batch(batch, batch_info)

    def state_dict(self) -> Any:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: Any) -> None:
        self.batches = state_dict["batches"]


class Scheduled(Clean):
    """Needs an argument of the trainer: `--set scheduler_step_freq=batch`."""

    def schedulers(self, optimizer: Any) -> dict[str, Any]:
        return {"schedulers": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4 * STEPS)}


class Forgetful(Scheduled):
    """Does not save how many batches it has trained."""

    def state_dict(self) -> Any:
        return None

    def load_state_dict(self, state_dict: Any) -> None:
        pass


class Noting(Clean):
    """Its rank 0 notes how large batches are. A successor of that rank has no list."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.sizes: Any = [] if self.world_rank == 0 else None

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        result = super().train_batch(batch, batch_info)
        if self.world_rank == 0:
            self.sizes.append(result["num_samples"])
        return result
