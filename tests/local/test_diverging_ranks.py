"""Code that lets the ranks train different models, without an error: it is found, and the message names the place and the cause."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import DivergenceError, ElasticConfig
from raysgd.torch import TorchTrainer, TrainingOperator
from tests.local.group import Cluster

STEPS = 16


class Mistaken(TrainingOperator):
    """Makes the mistake that the config names."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(1)
        model, self.mistake = nn.Linear(4, 1, bias=False), config["mistake"]
        rate = 0.05 * (1 + self.world_rank) if self.mistake == "a rate for each rank" else 0.05
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss()
        )
        if self.mistake == "an unregistered module":
            self.second = nn.Linear(4, 4)
            self.second_optimizer = torch.optim.SGD(self.second.parameters(), lr=0.05)
        features = torch.randn(8 * STEPS, 4, generator=torch.Generator().manual_seed(0))
        data = TensorDataset(features, 3 * features.sum(1, keepdim=True))
        self.register_data(train_loader=DataLoader(data, batch_size=4, shuffle=True))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        features, target = batch
        if self.mistake == "an unregistered module":
            self.second_optimizer.zero_grad()
            features = self.second(features)
        loss = self.criterion(self.predicted(features), target)
        self.zero_grad(self.optimizer)
        self.backward(loss)
        self.step(self.optimizer)
        if self.mistake == "an unregistered module":
            self.second_optimizer.step()
        return {"loss": loss.item(), "num_samples": len(target)}

    def predicted(self, features: torch.Tensor) -> torch.Tensor:
        return self.model(features)  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def cluster() -> Iterator[None]:
    with Cluster():
        yield


def trainer(mistake: str, **elastic: Any) -> TorchTrainer:
    return TorchTrainer(
        training_operator_cls=Mistaken,
        config={"mistake": mistake},
        num_workers=2,
        use_gpu=False,
        elastic=ElasticConfig(**elastic),
    )


def weights_of(each: Any, name: str = "model") -> Any:
    return each.apply_all_operators(lambda operator: next(getattr(operator, name).parameters()).flatten().tolist())


@pytest.mark.parametrize(
    ("mistake", "named", "differing"),
    [
        (
            "an unregistered module",
            "of self.second, which belongs to no registered model and is therefore not averaged, differs between rank 0 and rank 1",
            "second",
        ),
        (
            "a rate for each rank",
            "the parameter weight of self.model differs between rank 0 and rank 1 by about",
            "model",
        ),
    ],
)
def test_a_mistake_that_raises_no_error_is_logged_once(
    mistake: str, named: str, differing: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "raysgd"), trainer(mistake) as training:
        training.train()
        training.train()
        first, second = weights_of(training, differing)
        assert first != second
    (text,) = [record.getMessage() for record in caplog.records if "do not train the same model" in record.getMessage()]
    assert text.startswith(f"after step {STEPS} ")
    assert named in text
    assert "self.model.module(x)" in text
    assert "not passed to register()" in text


def test_an_error_is_raised_by_the_call_and_the_trainer_can_be_used_again() -> None:
    """The next call begins with rank 0's weights on all ranks."""
    with trainer("a rate for each rank", on_divergence="raise") as training:
        with pytest.raises(DivergenceError, match=f"after step {STEPS} .* weight of self.model differs between"):
            training.train()
        training.apply_all_operators(lambda operator: operator.optimizer.param_groups[0].update(lr=0.05))
        training.train()
        first, second = weights_of(training)
        assert first == second
        assert training.recoveries == []


def test_nothing_is_compared_if_the_ranks_are_meant_to_differ(caplog: pytest.LogCaptureFixture) -> None:
    with trainer("a rate for each rank", on_divergence=None) as training:
        training.train(num_steps=200)
        first, second = weights_of(training)
    assert first != second and "do not train the same model" not in caplog.text
