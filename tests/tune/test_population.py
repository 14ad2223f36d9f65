"""The class API in Tune's population-based training, and after a trial was killed."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from raysgd import TorchTrainer, TrainingOperator

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


def rate(operator: Any) -> float:
    return float(operator.optimizer.param_groups[0]["lr"])


def step(trainer: Any, info: dict[str, Any]) -> dict[str, Any]:
    rates = trainer.apply_all_operators(rate)
    return {**trainer.train(max_retries=0), **trainer.validate(), "rates": rates}


@pytest.mark.nightly
def test_a_trial_copies_another_one_and_keeps_its_own_rate(ray_cluster: None, tmp_path: Path) -> None:
    """One rate is too small. After two epochs its trial copies the other one's weights, and continues with a third rate."""
    trainable = TorchTrainer.as_trainable(training_operator_cls=Line, use_gpu=False, override_tune_step=step)
    population = tune.schedulers.PopulationBasedTraining(
        time_attr="training_iteration",
        metric="val_loss",
        mode="min",
        perturbation_interval=2,
        quantile_fraction=0.5,
        hyperparam_mutations={"lr": [0.1, 1e-6]},
        custom_explore_fn=lambda config: {**config, "lr": 0.05},
        synch=True,
    )
    results = tune.Tuner(
        trainable,
        param_space={"lr": tune.grid_search([0.1, 1e-6])},
        tune_config=tune.TuneConfig(scheduler=population),
        run_config=tune.RunConfig(stop={"training_iteration": 3}, storage_path=str(tmp_path), verbose=0),
    ).fit()
    assert not results.errors
    copied = next(result for result in results if 0.05 in list(result.metrics_dataframe["config/lr"]))
    rows = copied.metrics_dataframe
    changed = list(rows["config/lr"]).index(0.05)
    losses = list(rows["val_loss"])
    assert losses[changed] < 0.5 * losses[0], "it has the other trial's weights"
    assert copied.metrics["rates"] == pytest.approx([0.05]), "it has its own rate"
    assert copied.metrics["epoch"] == 3


def killing_step(trainer: Any, info: dict[str, Any]) -> dict[str, Any]:
    mark = Path(trainer.apply_all_operators(lambda operator: operator.config["mark"])[0])
    if info["iteration"] == 2 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return {**trainer.train(max_retries=0), "iteration": info["iteration"]}


@pytest.mark.elastic
def test_a_killed_trial_is_restarted(ray_cluster: None, tmp_path: Path) -> None:
    trainable = TorchTrainer.as_trainable(training_operator_cls=Line, use_gpu=False, override_tune_step=killing_step)
    (result,) = tune.Tuner(
        trainable,
        param_space={"lr": 0.1, "mark": str(tmp_path / "mark")},
        run_config=tune.RunConfig(
            stop={"training_iteration": 4},
            storage_path=str(tmp_path / "runs"),
            verbose=0,
            failure_config=tune.FailureConfig(max_failures=1),
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1),
        ),
    ).fit()
    assert result.error is None
    assert (tmp_path / "mark").exists(), "the trial was killed"
    assert (result.metrics["epoch"], result.metrics["iteration"]) == (4, 3), "it resumed from its checkpoint"
