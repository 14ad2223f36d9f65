"""Operators for `raysgd drill`: one without a fault, and others with one each."""

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TrainingOperator

SAMPLES, BATCH_SIZE = 480, 4


class PlainSGD:
    """Steps as an optimizer does, but is no subclass of torch's, so it has no hooks."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float, momentum: float) -> None:
        self._sgd = torch.optim.SGD(parameters, lr=lr, momentum=momentum)
        self.param_groups, self.zero_grad = self._sgd.param_groups, self._sgd.zero_grad
        self.state_dict, self.load_state_dict = self._sgd.state_dict, self._sgd.load_state_dict

    def step(self) -> None:
        self._sgd.step()


class Clean(TrainingOperator):
    """Has a state of its own, which it saves, and attributes that each batch sets anew."""

    optimizer_cls: Any = torch.optim.SGD

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
        optimizer = self.optimizer_cls(model.parameters(), lr=config.get("lr", 0.05), momentum=0.9)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=nn.CrossEntropyLoss()
        )
        generator = torch.Generator().manual_seed(7)
        x = torch.randn(SAMPLES, 8, generator=generator)
        self.register_data(train_loader=self.loader(x, (x.sum(dim=1) > 0).long()))
        self.batches = 0
        self.last_loss: Any = None

    def loader(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return DataLoader(TensorDataset(x, y), batch_size=BATCH_SIZE, shuffle=True)

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.01)
        self.batches += 1
        result = super().train_batch(batch, batch_info)
        self.last_loss = result["train_loss"]
        return {**result, "last_loss": float(self.last_loss)}

    def state_dict(self) -> Any:
        return {"batches": self.batches}

    def load_state_dict(self, state_dict: Any) -> None:
        self.batches = state_dict["batches"]


class WithoutHooks(Clean):
    """Trains with an optimizer that has no hooks."""

    optimizer_cls = PlainSGD


class Looping(Clean):
    """Has a loop of its own, and leaves each epoch in the middle; the next call trains the rest."""

    def train_epoch(
        self, iterator: Iterable[Any], info: Any = None, num_steps: int | None = None, epoch_idx: int = 0
    ) -> dict[str, Any]:
        loss = 0.0
        for number, (x, y) in enumerate(iterator):
            self.batches += 1
            time.sleep(0.01)
            self.zero_grad()
            output = self.criterion(self.model(x), y)
            self.backward(output)
            self.step(self.optimizer)
            loss = float(output.detach())
            if number == SAMPLES // BATCH_SIZE // 4:
                break
        return {"train_loss": loss}


class Forgetful(Clean):
    """Does not save how many batches it has trained."""

    def state_dict(self) -> Any:
        return None

    def load_state_dict(self, state_dict: Any) -> None:
        pass


class Swallowing(Clean):
    """Catches every error of a batch."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        try:
            return super().train_batch(batch, batch_info)
        except RuntimeError:
            return {"train_loss": 0.0, "last_loss": 0.0, "num_samples": len(batch[1])}


class Slow(Clean):
    """Has a batch that takes longer than the limit of the test."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        time.sleep(8.0 if self.global_step == 4 and self.world_rank == 1 else 0.0)
        return super().train_batch(batch, batch_info)


class Dividing(Clean):
    """Divides its data in setup, where the rank of a replacement worker is always 0; raysgd divides it again."""

    def loader(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return super().loader(x[self.world_rank :: 2], y[self.world_rank :: 2])


class Drifting(Clean):
    """Changes the weights of one rank."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        result = super().train_batch(batch, batch_info)
        if self.world_rank == 1:
            with torch.no_grad():
                next(self.model.parameters()).add_(1e-3)
        return result
