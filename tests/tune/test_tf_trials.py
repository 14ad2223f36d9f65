"""Keras models as Tune trials."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

tune = pytest.importorskip("ray.tune", reason="needs Ray Tune (raysgd[tune])")
tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

from raysgd.tf import TFTrainable  # noqa: E402  (needs Tune)


def model_creator(config: dict[str, Any]) -> Any:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
    model.compile(optimizer=keras.optimizers.SGD(config["lr"]), loss="mse")
    return model


def data_creator(config: dict[str, Any]) -> tuple[Any, Any]:
    x = tf.linspace([-1.0], [1.0], 100)
    data = tf.data.Dataset.from_tensor_slices((x, 2 * x - 3)).batch(config["batch_size"])
    return data, data


class KilledOnce(TFTrainable):
    """The trial with the better rate is killed once, in its third epoch."""

    def step(self) -> dict[str, Any]:
        mark = Path(self.config["mark"])
        if self.training_iteration == 2 and self.config["lr"] > 0.1 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step()


@pytest.mark.elastic
@pytest.mark.nightly
def test_a_grid_search_with_a_killed_trial(ray_cluster: None, tmp_path: Path) -> None:
    results = tune.Tuner(
        KilledOnce,
        param_space={
            "model_creator": model_creator,
            "data_creator": data_creator,
            "trainer_config": {"batch_size": 10},
            "lr": tune.grid_search([0.2, 1e-6]),
            "mark": str(tmp_path / "mark"),
        },
        run_config=tune.RunConfig(
            stop={"training_iteration": 4},
            storage_path=str(tmp_path / "runs"),
            verbose=0,
            failure_config=tune.FailureConfig(max_failures=1),
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1),
        ),
    ).fit()
    assert not results.errors
    assert (tmp_path / "mark").exists(), "the trial was killed"
    losses = {result.config["lr"]: result.metrics["validation_loss"] for result in results}
    assert losses[0.2] < 0.01 < 5 < losses[1e-6]
    assert {result.metrics["training_iteration"] for result in results} == {4}


@pytest.mark.parametrize(
    ("config", "bundles"),
    [
        ({}, [{"CPU": 1}]),
        ({"num_replicas": 2}, [{"CPU": 1}] * 2),
        ({"num_replicas": 2, "num_cpus_per_worker": 2, "use_gpu": True}, [{"CPU": 2, "GPU": 1}] * 2),
    ],
)
def test_the_resources_of_a_trial(config: dict[str, Any], bundles: list[Any]) -> None:
    assert TFTrainable.default_resource_request(config).bundles == bundles
