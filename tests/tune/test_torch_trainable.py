"""Trainers as Tune trials: resources, results, checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import ConfigError, TorchTrainer, TrainingOperator

tune = pytest.importorskip("ray.tune", reason="needs Ray Tune (raysgd[tune])")


class Line(TrainingOperator):
    def setup(self, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        x = torch.randn(100, 3)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=optimizer, criterion=nn.MSELoss()
        )
        loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=10)
        self.register_data(train_loader=loader, validation_loader=loader)


def test_each_trial_has_its_own_workers(ray_cluster: None, tmp_path: Path) -> None:
    trainable = TorchTrainer.as_trainable(training_operator_cls=Line, num_workers=2, use_gpu=False)
    results = tune.Tuner(
        trainable,
        param_space={"lr": tune.grid_search([0.1, 0.001])},
        run_config=tune.RunConfig(
            stop={"training_iteration": 3},
            storage_path=str(tmp_path),
            verbose=0,
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
        ),
    ).fit()
    assert not results.errors
    losses = {result.config["lr"]: result.metrics["val_loss"] for result in results}
    assert losses[0.1] < 0.1 < losses[0.001]
    assert all(result.metrics["epoch"] == 3 for result in results)
    best = results.get_best_result(metric="val_loss", mode="min")
    with best.checkpoint.as_directory() as folder:
        trainer = TorchTrainer(training_operator_cls=Line, config={"lr": 0.1}, use_gpu=False)
        trainer.load(Path(folder) / "trainer.checkpoint")
        assert trainer.validate()["val_loss"] == pytest.approx(losses[0.1], rel=1e-5)
        trainer.shutdown()


@pytest.mark.parametrize(
    ("arguments", "trial", "bundles"),
    [
        ({"num_workers": 2}, {}, [{"CPU": 1}, {"CPU": 1}, {"CPU": 1}]),
        ({"num_workers": 2, "num_cpus_per_worker": 3}, {}, [{"CPU": 1}, {"CPU": 3}, {"CPU": 3}]),
        ({"num_workers": 2, "use_local": True}, {}, [{"CPU": 1}, {"CPU": 1}]),
        ({"num_workers": 2}, {"use_local": True}, [{"CPU": 1}, {"CPU": 1}]),
        ({"num_workers": 1, "use_local": True}, {}, [{"CPU": 1}]),
        ({"num_workers": 2}, {"num_workers": 1}, [{"CPU": 1}]),
        ({"num_workers": 2, "use_gpu": True}, {}, [{"CPU": 1}, {"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 1}]),
        (
            {"num_workers": 2, "resources_per_worker": {"TPU": 1}},
            {},
            [{"CPU": 1}, {"CPU": 1, "TPU": 1}, {"CPU": 1, "TPU": 1}],
        ),
        ({"num_workers": 1, "use_gpu": "auto"}, {}, [{"CPU": 1}]),
    ],
)
def test_the_resources_of_a_trial(arguments: dict[str, Any], trial: dict[str, Any], bundles: list[Any]) -> None:
    trainable = TorchTrainer.as_trainable(training_operator_cls=Line, **arguments)
    assert trainable.default_resource_request(trial).bundles == bundles


def test_override_tune_step_must_take_the_trainer_and_info() -> None:
    with pytest.raises(ConfigError, match="override_tune_step"):
        TorchTrainer.as_trainable(training_operator_cls=Line, override_tune_step=lambda trainer: {})
