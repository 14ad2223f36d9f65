"""Real process groups: unequal shares, and fewer workers than at the beginning, lead to the weights of one worker."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig, TorchTrainer, TrainingOptions
from raysgd.torch import TrainingOperator

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]

ROWS, BATCH = 23, 3


def parts() -> tuple[Any, Any, Any]:
    """Return a model in double precision with a buffer, its optimizer and its data."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 6), nn.GroupNorm(2, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    model.register_buffer("rows", torch.zeros(1))
    x = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(7)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    return model, optimizer, TensorDataset(x, (3 * x).sin().sum(1, keepdim=True))


class Curve(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        model, optimizer, data = parts()
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss()
        )
        self.register_data(train_loader=DataLoader(data, batch_size=BATCH))
        self.largest = 0

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.largest = max(self.largest, len(batch[0]))
        if not self.config.get("direct"):
            return super().train_batch(batch, batch_info)
        loss = self.criterion(self.model(batch[0]), batch[1])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"train_loss": loss.item(), "num_samples": len(batch[0])}


def by_hand(batch: int, clip: float | None) -> torch.Tensor:
    """Return the weights after two epochs with this batch size."""
    model, optimizer, data = parts()
    for _ in range(2):
        for x, y in DataLoader(data, batch_size=batch):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


DDP = {
    "helpers": ({}, {"clip_norm": 0.1}, {}),
    "compiled": ({}, {"compile": {"backend": "aot_eager"}}, {}),
    "direct": ({"direct": True}, {}, {}),
    "horovod": ({}, {"clip_norm": 0.1}, {"backend": "horovod"}),
    "horovod, direct": ({"direct": True}, {}, {"backend": "horovod"}),
}


@pytest.mark.parametrize(
    "case",
    [
        "direct",
        pytest.param("helpers", marks=pytest.mark.more),
        pytest.param("compiled", marks=pytest.mark.nightly),
        pytest.param("horovod", marks=pytest.mark.horovod),
        pytest.param("horovod, direct", marks=[pytest.mark.horovod, pytest.mark.nightly]),
    ],
)
def test_the_second_epoch_on_one_worker_of_two(case: str) -> None:
    config, options, arguments = DDP[case]
    with TorchTrainer(
        training_operator_cls=Curve,
        config=config,
        num_workers=2,
        use_gpu=False,
        elastic=ElasticConfig(batch="global"),
        options=TrainingOptions(**options),
        **arguments,
    ) as trainer:
        first = trainer.train()
        trainer.resize(1)
        second = trainer.train()
        assert trainer.apply_all_operators(lambda operator: operator.largest) == [BATCH]
        mine = nn.utils.parameters_to_vector(trainer.get_model().parameters()).detach()
    for result in (first, second):
        assert (result["batch_count"], result["num_samples"]) == (4, ROWS)
    torch.testing.assert_close(mine, by_hand(2 * BATCH, options.get("clip_norm")), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("direct", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_unequal_shares_of_sharded_models(direct: bool) -> None:
    options = TrainingOptions(parallel="fsdp", **({} if direct else {"clip_norm": 0.1, "accumulate": 2}))
    with TorchTrainer(
        training_operator_cls=Curve, config={"direct": direct}, num_workers=2, use_gpu=False, options=options
    ) as trainer:
        for _ in range(2):
            trainer.train()
        mine = nn.utils.parameters_to_vector(trainer.get_model().parameters()).detach()
    expected = by_hand(2 * BATCH, None) if direct else by_hand(4 * BATCH, 0.1)
    torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)
