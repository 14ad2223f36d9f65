"""`seed=` on two workers, and `test()`, in which a worker fails."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from raysgd import TorchTrainer
from tests.class_api.operators import weights
from tests.torch.small import rows
from tests.torch.test_seed import Augmented


class Dying(Augmented):
    """Rank 1 dies in its second batch of a test, once."""

    def register_data(self, **data: Any) -> None:
        plain = torch.utils.data.TensorDataset(rows(30)[0].double())
        super().register_data(**data, test_loader=torch.utils.data.DataLoader(plain, batch_size=4))

    def test_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        marker = Path(self.config["marker"])
        if self.world_rank == 1 and batch_info["batch_idx"] == 1 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"num_samples": len(batch[0]), "test_first": batch[0][:, 0].mean()}


@pytest.mark.elastic
def test_two_runs_on_two_workers_end_with_the_same_bits(ray_cluster: None, tmp_path: Path) -> None:
    found = []
    for run in range(2):
        config = {"processes": 2, "marker": str(tmp_path / f"died-{run}")}
        trainer = TorchTrainer(training_operator_cls=Dying, num_workers=2, use_gpu=False, config=config, seed=7)
        with trainer:
            trainer.fit(2)
            seen = trainer.apply_all_operators(lambda operator: torch.cat(operator.seen))
            found.append((weights(trainer), torch.cat(seen)))
            tested = trainer.test()
            assert tested["num_samples"] == 30
            assert tested["test_first"] == pytest.approx(float(rows(30)[0][:, 0].mean()))
            assert "worker death" in [recovery.reason for recovery in trainer.recoveries]
    (first, drawn), (second, again) = found
    assert torch.equal(first, second) and torch.equal(drawn, again)
    assert len(drawn[:, 1:4].unique()) == 3 * 24, "workers and loader processes draw different numbers"
