"""`seed=` on two workers, and `test()` and `predict()`, in which a worker fails."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer
from tests.torch.small import rows, weights
from tests.torch.test_seed import Augmented

DATA = TensorDataset(torch.cat([rows(30)[0], rows(30)[1]], dim=1).double())


class Dying(Augmented):
    """Rank 1 dies once, in the second batch of the call that the config names."""

    def register_data(self, **data: Any) -> None:
        super().register_data(**data, test_loader=DataLoader(DATA, batch_size=4))

    def die_once(self, call: str, batch_info: dict[str, Any]) -> None:
        marker = Path(self.config["marker"])
        if self.config["dies_in"] == call and self.world_rank == batch_info["batch_idx"] == 1 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def test_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.die_once("test", batch_info)
        return {"num_samples": len(batch[0]), "test_first": batch[0][:, 0].mean()}

    def predict_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
        self.die_once("predict", batch_info)
        return super().predict_batch(batch, batch_info), torch.full((len(batch[0]),), self.world_rank)


@pytest.mark.elastic
def test_two_runs_on_two_workers_end_with_the_same_bits(ray_cluster: None, tmp_path: Path) -> None:
    found = []
    for dies_in in ("test", "predict"):
        config = {"processes": 2, "marker": str(tmp_path / dies_in), "dies_in": dies_in}
        trainer = TorchTrainer(training_operator_cls=Dying, num_workers=2, use_gpu=False, config=config, seed=7)
        with trainer:
            trainer.fit(2)
            seen = trainer.apply_all_operators(lambda operator: torch.cat(operator.seen))
            found.append((weights(trainer), torch.cat(seen)))
            with torch.no_grad():
                expected = trainer.get_model()(DATA.tensors[0])
            outputs, ranks = trainer.predict(DATA, batch_size=4)
            assert torch.allclose(outputs, expected, atol=1e-6) and len(ranks) == 30, "in the order of the data"
            tested = trainer.test()
            assert tested["num_samples"] == 30
            assert tested["test_first"] == pytest.approx(float(DATA.tensors[0][:, 0].mean()))
            assert "worker death" in [recovery.reason for recovery in trainer.recoveries]
    (first, drawn), (second, again) = found
    assert torch.equal(first, second) and torch.equal(drawn, again)
    assert len(drawn[:, 1:4].unique()) == 3 * 24, "workers and loader processes draw different numbers"
