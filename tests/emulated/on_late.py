"""Operators on the late device. Importing this changes nothing: the device is registered when an operator is made."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd.torch import TrainingOperator

__all__ = ["Net", "OnLate"]


def _late(operator: Any) -> torch.device:
    from tests.emulated.late_device import DEVICE

    return DEVICE


class OnLate:
    """Goes before the operator's class, so that it trains on the late device."""

    _device: Any = property(_late, lambda operator, device: None)


class Net(TrainingOperator):
    """A small model with BatchNorm. `config` has the optimizer's name, and its arguments."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))
        kind = getattr(torch.optim, config.get("optimizer", "SGD"))
        self.model, self.optimizer, self.criterion = self.register(
            models=model,
            optimizers=kind(model.parameters(), lr=0.1, **config.get("arguments", {})),
            criterion=nn.CrossEntropyLoss(weight=torch.arange(1.0, 5.0)),
        )
        loader = DataLoader(TensorDataset(*rows()), batch_size=8)
        self.register_data(train_loader=loader, validation_loader=loader)


def rows(count: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 8, generator=generator), torch.randint(0, 4, (count,), generator=generator)
