"""With several workers, the result does not depend on their number or on worker failures."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning", reason="needs Lightning: pip install 'raysgd[lightning]'")

from raysgd import ElasticConfig, TorchTrainer, TrainingOperator
from tests.torch.lightning import modules

pytestmark = [pytest.mark.more, pytest.mark.slow]

EPOCHS, ROWS = 3, 192  # twelve full global batches of 16, so that all ranks' parts are equal


def trainer_of(workers: int, config: dict[str, Any], **options: Any) -> TorchTrainer:
    """The global batch is 16 on any number of workers."""
    operator_cls = TrainingOperator.from_ptl(modules.Spread)
    config = {"count": ROWS, "batch_size": 16 // workers, **config}
    elastic = ElasticConfig(**options)
    return TorchTrainer(training_operator_cls=operator_cls, num_workers=workers, config=config, elastic=elastic)


def alone(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    with trainer_of(1, config) as trainer:
        for _ in range(EPOCHS):
            trainer.train()
            trainer.validate()
        return dict(trainer.get_model().state_dict())


def weights(trainer: TorchTrainer) -> list[dict[str, torch.Tensor]]:
    return trainer.apply_all_operators(lambda operator: dict(operator.module.state_dict()))


def assert_all_equal(trainer: TorchTrainer, expected: dict[str, torch.Tensor]) -> None:
    for mine in weights(trainer):
        for name, value in expected.items():
            torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_two_workers_give_the_result_of_one(ray_cluster: None, tmp_path: Path) -> None:
    """This includes the schedulers, and a worker without a validation batch."""
    config = {"folder": str(tmp_path), "val_count": 5}
    with trainer_of(2, config) as trainer:
        assert (tmp_path / "prepared").read_text() == "0\n"
        for _ in range(EPOCHS):
            assert trainer.train()["num_samples"] == ROWS
            validated = trainer.validate()
        assert validated["num_samples"] == 5
        rates = trainer.apply_all_operators(lambda operator: operator.optimizers[0].param_groups[0]["lr"])
        assert_all_equal(trainer, alone(config))
    assert rates[0] == rates[1] < 0.1


@pytest.mark.elastic
def test_after_a_worker_failure_ranks_are_equal_and_hooks_are_called(ray_cluster: None, tmp_path: Path) -> None:
    config = {"folder": str(tmp_path), "fault_at": 17}
    with trainer_of(2, config, grow="epoch") as trainer:
        for epoch in range(EPOCHS):
            result = trainer.train()
            assert (result["epoch"], result["num_samples"]) == (epoch + 1, ROWS)
            trainer.validate()
            if epoch == 1:
                assert trainer.recoveries[0].removed_ranks == (1,)
                trainer.resize(2)  # it may have joined before: between two calls
        calls = trainer.apply_all_operators(lambda operator: operator.module.calls)
        assert_all_equal(trainer, weights(trainer)[0])  # steps had fewer samples, so a run without failures has others
    survivor = [(what, epoch) for epoch in range(EPOCHS) for what in ("start", "end")]
    assert calls == [survivor, [("start", 2), ("end", 2)]]
