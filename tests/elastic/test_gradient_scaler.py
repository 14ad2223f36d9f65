"""fp16 and worker failures: replacements get the loss scale, and each skipped step is counted once."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ElasticConfig, TorchTrainer, TrainingOptions
from raysgd.torch import TrainingOperator

pytestmark = [pytest.mark.elastic, pytest.mark.usefixtures("ray_cluster")]


class Bursts(TrainingOperator):
    """Its gradients are infinite in the steps that the config names; the second rank is killed in another of them."""

    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.01), criterion=nn.MSELoss()
        )
        x = torch.randn(96, 3, generator=torch.Generator().manual_seed(1))
        self.register_data(train_loader=DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4))

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        x, y = batch
        step = batch_info["global_step"]
        with self.autocast():
            loss = self.criterion(self.model(x), y)
        if step in self.config["bursts"]:
            loss = loss * float("inf")
        self.zero_grad()
        self.backward(loss)
        if self.world_rank == 1 and step == self.config["dies"] and not os.path.exists(self.config["mark"]):
            Path(self.config["mark"]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.step()
        return {"num_samples": len(x)}


def begin_at_64(operator: Any) -> None:
    operator._amp_scaler.load_state_dict({**operator._amp_scaler.state_dict(), "scale": 64.0})


def test_the_scale_and_the_count_survive_a_failure(tmp_path: Path) -> None:
    config = {"bursts": [1, 3, 8], "dies": 6, "mark": str(tmp_path / "died")}
    given: dict[str, Any] = {"num_workers": 2, "use_gpu": False, "config": config}
    options = TrainingOptions(precision="fp16")
    with TorchTrainer(
        training_operator_cls=Bursts, options=options, elastic=ElasticConfig(grow="epoch"), **given
    ) as trainer:
        trainer.apply_all_operators(begin_at_64)  # a scale at which nothing overflows by itself
        result = trainer.train()
        assert [failure.in_place for failure in trainer.recoveries] == [True]
        assert (result["skipped_steps"], result["num_samples"]) == (3, 96)
        trainer.resize(2)
        states = trainer.apply_all_operators(lambda operator: operator._amp_scaler.state_dict())
        assert len(states) == 2 and states[0] == states[1]
        assert states[0]["scale"] == 64.0 / 8
        assert "skipped_steps" not in trainer.train()
