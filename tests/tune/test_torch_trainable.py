"""Trainers as Tune trials: resources, results, checkpoints, a trial that is killed, and a population of trials."""

import os
import signal
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


@pytest.mark.elastic
def test_each_trial_has_its_own_workers_and_a_killed_one_is_restarted(ray_cluster: None, tmp_path: Path) -> None:
    class KilledOnce(TorchTrainer.as_trainable(training_operator_cls=Line, num_workers=2, use_gpu=False)):  # type: ignore[misc]
        """The trial with the better rate is killed once, in its third epoch."""

        def step(self) -> dict[str, Any]:
            mark = Path(self.config["mark"])
            if self.training_iteration == 2 and self.config["lr"] > 0.01 and not mark.exists():
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().step()

    results = tune.Tuner(
        KilledOnce,
        param_space={"lr": tune.grid_search([0.1, 0.001]), "mark": str(tmp_path / "mark")},
        run_config=tune.RunConfig(
            stop={"training_iteration": 3},
            storage_path=str(tmp_path / "runs"),
            verbose=0,
            failure_config=tune.FailureConfig(max_failures=1),
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1),
        ),
    ).fit()
    assert not results.errors
    assert (tmp_path / "mark").exists(), "the trial was killed"
    losses = {result.config["lr"]: result.metrics["val_loss"] for result in results}
    assert losses[0.1] < 0.1 < losses[0.001]
    assert all(result.metrics["epoch"] == 3 for result in results), "it resumed from its checkpoint"
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
        ({"num_workers": 2}, {"use_local": True}, [{"CPU": 1}, {"CPU": 1}]),
        ({"num_workers": 2}, {"num_workers": 1}, [{"CPU": 1}]),
        ({"num_workers": 2, "use_gpu": True}, {}, [{"CPU": 1}, {"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 1}]),
        (
            {"num_workers": 2, "resources_per_worker": {"TPU": 1}},
            {},
            [{"CPU": 1}, {"CPU": 1, "TPU": 1}, {"CPU": 1, "TPU": 1}],
        ),
        ({"num_workers": 1, "use_gpu": "auto"}, {}, [{"CPU": 1}]),
        ({"resources_per_worker": {"TPU": 1}}, {}, [{"CPU": 1}, {"CPU": 1, "TPU": 1}]),
        ({"resources_per_worker": {"CPU": 2}}, {}, [{"CPU": 2}]),
    ],
)
def test_the_resources_of_a_trial(arguments: dict[str, Any], trial: dict[str, Any], bundles: list[Any]) -> None:
    trainable = TorchTrainer.as_trainable(training_operator_cls=Line, **arguments)
    assert trainable.default_resource_request(trial).bundles == bundles


def rate(operator: Any) -> float:
    return float(operator.optimizer.param_groups[0]["lr"])


def step(trainer: Any, info: dict[str, Any]) -> dict[str, Any]:
    rates = trainer.apply_all_operators(rate)
    return {**trainer.train(max_retries=0), **trainer.validate(), "rates": rates, "iteration": info["iteration"]}


def test_override_tune_step_gets_the_iteration(tmp_path: Path) -> None:
    trainable = TorchTrainer.as_trainable(training_operator_cls=Line, use_gpu=False, override_tune_step=step)
    first, second = trainable({"lr": 0.1}), trainable({"lr": 0.2})
    assert [first.train()["iteration"] for _ in range(2)] == [0, 1]
    second.restore(first.save(str(tmp_path)))
    found = second.train()
    assert (found["iteration"], found["epoch"], found["rates"]) == (2, 3, [0.2])
    for trial in (first, second):
        trial.stop()
    with pytest.raises(ConfigError, match="override_tune_step"):
        TorchTrainer.as_trainable(training_operator_cls=Line, override_tune_step=lambda trainer: {})


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
