"""User code that catches the errors of its batches, and with them that of a peer that fails: no step is lost."""

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig, TorchTrainer
from raysgd.torch import TrainingOperator
from tests.local.group import Cluster, Fault
from tests.local.runs import weights_of
from tests.peek import rows_now


class Catching(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(2)
        model, x = torch.nn.Linear(2, 1), torch.rand(48, 2, generator=torch.Generator().manual_seed(1))
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.5), criterion=torch.nn.MSELoss()
        )
        data = TensorDataset(x, x[:, :1])
        self.register_data(train_loader=DataLoader(data, 2, shuffle=True, generator=torch.Generator().manual_seed(3)))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        with suppress(Exception):
            return super().train_batch(batch, batch_info)
        return {}

    def step(self, optimizer: Any = None) -> bool:
        made = super().step(optimizer)
        Cluster.running.notes += rows_now(self)
        return made


class OwnSteps(Catching):
    """Catches the error of the backward pass only, and makes a step with the gradients that it has left."""

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        x, y = batch
        self.optimizer.zero_grad()
        loss = self.criterion(self.model(x), y)
        try:
            self.backward(loss)
        except Exception:
            for parameter in self.model.parameters():
                parameter.grad = torch.full_like(parameter, 1e9)
        self.optimizer.step() if self.config["directly"] else self.step()
        return {"train_loss": loss, "num_samples": len(x)}


class OwnLoop(Catching):
    """Catches them in a loop of its own, and around it."""

    def train_epoch(self, iterator: Any, info: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        with suppress(Exception):
            for batch in iterator:
                self.train_batch(batch, info)
        return {"num_samples": 0}


def trained(
    *faults: Fault, operator: type[TrainingOperator] = Catching, **config: Any
) -> tuple[torch.Tensor, dict[str, Any], list[int]]:
    with (
        Cluster(faults) as cluster,
        TorchTrainer(
            training_operator_cls=operator,
            config=config,
            num_workers=3,
            use_gpu=False,
            elastic=ElasticConfig(hang_timeout_s=60, grow=False),
        ) as trainer,
    ):
        result = trainer.train()
        assert not cluster.left
        return weights_of(trainer), result, sorted(cluster.notes)


@pytest.mark.parametrize("at", ["forward", "reduced", "applied"])
def test_a_caught_error_of_a_peer_loses_no_step(at: str) -> None:
    (weights, result, _), (expected, same, _) = trained(Fault("kill", at, rank=1, step=4)), trained()
    assert torch.allclose(weights, expected, rtol=1e-6)
    assert result["num_samples"] == same["num_samples"] == 48


@pytest.mark.parametrize("directly", [False, True])
def test_no_step_is_made_after_it(directly: bool) -> None:
    weights, result, _ = trained(Fault("kill", "forward", rank=1, step=4), operator=OwnSteps, directly=directly)
    assert weights.abs().max() < 1 and result["num_samples"] == 48


def test_it_loses_no_sample_in_a_loop_of_its_own() -> None:
    assert trained(Fault("kill", "forward", rank=1, step=4), operator=OwnLoop)[2] == list(range(48))
