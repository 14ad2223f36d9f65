"""Code that lets the ranks train different models, without an error: it is found, and the message names the place and the cause.
tests/local/test_diverging_ranks.py has other mistakes, and errors."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig
from raysgd.torch import TorchTrainer, TrainingOperator

STEPS = 16


class Mistaken(TrainingOperator):
    """Makes the mistake that the config names; "a flipped bit", once, in the fourth step of rank 1."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(1)
        model, self.steps = nn.Linear(4, 1, bias=False), 0
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss()
        )
        features = torch.randn(8 * STEPS, 4, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(features, 3 * features.sum(1, keepdim=True))
        self.register_data(train_loader=DataLoader(data, batch_size=4, shuffle=True))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        features, target = batch
        self.steps += 1
        mark = self.config["mark"]
        if mark and self.world_rank == 1 and self.steps == 4 and not os.path.exists(mark):
            Path(mark).touch()
            with torch.no_grad():
                self.model.module.weight[0, 0] += 0.5
        model = self.model.module if self.config["mistake"] == "the unwrapped model" else self.model
        loss = self.criterion(model(features), target)
        self.zero_grad()
        self.backward(loss)
        self.step()
        return {"loss": loss.item(), "num_samples": len(target)}


def trainer(mistake: str, *, workers: int = 2, mark: str = "", **elastic: Any) -> TorchTrainer:
    config = {"mistake": mistake, "mark": mark}
    return TorchTrainer(
        training_operator_cls=Mistaken,
        config=config,
        num_workers=workers,
        use_gpu=False,
        elastic=ElasticConfig(**elastic),
    )


def weights_of(each: Any) -> Any:
    return each.apply_all_operators(lambda operator: next(operator.model.parameters()).flatten().tolist())


def test_a_mistake_that_raises_no_error_is_logged_once(ray_cluster: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "raysgd"), trainer("the unwrapped model") as training:
        training.train()
        training.train()
        first, second = weights_of(training)
        assert first != second
    (text,) = [record.getMessage() for record in caplog.records if "do not train the same model" in record.getMessage()]
    assert text.startswith(f"after step {STEPS} ")
    assert "the parameter weight of self.model differs between rank 0 and rank 1 by about" in text
    assert "self.model.module(x)" in text


def test_a_rank_that_differs_from_most_is_evicted(ray_cluster: None, tmp_path: Path) -> None:
    """Its replacement has the weights of the others."""
    mark = str(tmp_path / "flipped")
    with trainer("a flipped bit", workers=3, mark=mark, compare_weights=2, on_divergence="evict") as training:
        training.train()
        (failure,) = training.recoveries
        assert (failure.reason, failure.removed_ranks) == ("divergence", (1,))
        assert "its weights differ from those of most ranks after step 4: " in failure.detail
        training.resize(3)
        training.train()
        first, second, third = weights_of(training)
        assert first == second == third
