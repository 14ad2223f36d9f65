"""Code that calls the model without DDP's wrapper lets the ranks train different models, without an error: it is found, and the
message names the place and the cause. tests/local/test_diverging_ranks.py has other mistakes, and errors."""

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd.torch import TorchTrainer, TrainingOperator

STEPS = 16


class Mistaken(TrainingOperator):
    """Calls the unwrapped model, whose gradients are not averaged."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(1)
        model = nn.Linear(4, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss()
        )
        features = torch.randn(8 * STEPS, 4, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(features, 3 * features.sum(1, keepdim=True))
        self.register_data(train_loader=DataLoader(data, batch_size=4, shuffle=True))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        features, target = batch
        loss = self.criterion(self.model.module(features), target)
        self.zero_grad()
        self.backward(loss)
        self.step()
        return {"loss": loss.item(), "num_samples": len(target)}


def weights_of(operator: Any) -> list[float]:
    return next(operator.model.parameters()).flatten().tolist()


def test_a_mistake_that_raises_no_error_is_logged_once(ray_cluster: None, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "raysgd"),
        TorchTrainer(training_operator_cls=Mistaken, num_workers=2, use_gpu=False) as training,
    ):
        training.train()
        training.train()
        first, second = training.apply_all_operators(weights_of)
        assert first != second
    (text,) = [record.getMessage() for record in caplog.records if "do not train the same model" in record.getMessage()]
    assert text.startswith(f"after step {STEPS} ")
    assert "the parameter weight of self.model differs between rank 0 and rank 1 by about" in text
    assert "self.model.module(x)" in text
