"""Unequal shares with DistributedDataParallel: the slow worker gets fewer parts, and the weights are those of one worker."""

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig, TorchTrainer
from raysgd.core.decisions.dealing import EVERY
from raysgd.torch import TrainingOperator
from tests.torch.small import weights

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.slow]

BATCH, PARTS = 128, 8
ROWS = (EVERY + 10) * BATCH


class Slow(TrainingOperator):
    """One of its workers needs more time for each part. Its BatchNorm has buffers, which DDP must not send."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss()
        )
        x = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(1)).double()
        loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=config["batch"], shuffle=True)
        self.register_data(train_loader=loader)
        self.slow = config["slow"] == self.world_rank

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        time.sleep(0.008 if self.slow else 0.001)
        return super().train_batch(batch, batch_info)


def trainer(workers: int, shares: Any, slow: int) -> TorchTrainer:
    return TorchTrainer(
        training_operator_cls=Slow,
        config={"batch": BATCH // workers, "slow": slow},
        num_workers=workers,
        parts=PARTS,
        use_gpu=False,
        seed=1,
        elastic=ElasticConfig(shares=shares, grow=False),
    )


@pytest.mark.parametrize("slow", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_the_slow_worker_gets_fewer_parts(slow: int) -> None:
    with trainer(1, "equal", -1) as alone:
        expected = [(alone.train()["num_samples"], weights(alone)) for _ in range(3)]
    with trainer(2, "speed", slow) as run:
        for count, same in expected[:2]:
            samples = [each["num_samples"] for each in run.train(reduce_results=False)]
            assert sum(samples) == count == ROWS
            assert samples[1 - slow] > samples[slow]
            torch.testing.assert_close(weights(run), same, rtol=1e-9, atol=1e-12)
        run.resize(1)
        run.train()
        torch.testing.assert_close(weights(run), expected[2][1], rtol=1e-9, atol=1e-12)
