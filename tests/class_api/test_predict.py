"""`predict` on several workers: the outputs are in the order of the data, also after a worker has failed."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer
from tests.class_api.operators import Classes


class Dying(Classes):
    """The last rank dies in its second batch, once."""

    def predict_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        marker = Path(self.config["marker"])
        if self.world_rank == 1 and batch_info["batch_idx"] == 1 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().predict_batch(batch, batch_info), torch.full((len(batch[0]),), self.world_rank)


@pytest.mark.elastic
def test_the_order_is_that_of_the_data(ray_cluster: None, tmp_path: Path) -> None:
    data = TensorDataset(torch.randn(101, 3), torch.zeros(101))
    config = {"marker": str(tmp_path / "died")}
    with TorchTrainer(training_operator_cls=Dying, num_workers=2, use_gpu=False, config=config) as trainer:
        with torch.no_grad():
            expected = trainer.get_model()(data.tensors[0])
        for given in (data, DataLoader(data, batch_size=7)):
            outputs, ranks = trainer.predict(given, batch_size=8)
            assert torch.allclose(outputs, expected, atol=1e-6)
        assert [recovery.reason for recovery in trainer.recoveries][:1] == ["worker death"]
        assert (tmp_path / "died").exists() and len(ranks) == 101
