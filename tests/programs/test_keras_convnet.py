"""The Keras convnet ends with the weights of `model.fit` on the same data, and prints the same figures.

`fit` trains in one process, with the batches of all workers together. Two workers add the gradients of the halves of a batch
in another order, which float32 rounds otherwise. So they compute in float64 here, and so does `fit`.
"""

import os
import signal
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tensorflow", reason="needs TensorFlow: pip install 'raysgd[tensorflow]'")

EPOCHS, ROWS, BATCH = 3, 210, 32  # the last batch has 18 rows: 9 for each of two workers
ARGUMENTS = ["--epochs", str(EPOCHS), "--rows", str(ROWS), "--batch", str(BATCH)]
NAMES = {
    "train_loss": "exact",
    "train_accuracy": "accuracy",
    "validation_loss": "val_exact",
    "validation_accuracy": "val_accuracy",
    "learning_rate": "learning_rate",
}


def by_fit() -> tuple[list[dict[str, float]], list[np.ndarray]]:
    """Return the figures of each epoch, and the weights."""
    import keras
    import tensorflow as tf

    program = import_module("examples.programs.keras_convnet")
    keras.utils.set_random_seed(0)
    data = [tf.data.Dataset.from_tensor_slices(program.images(ROWS, seed)) for seed in (1, 2)]
    train, test = data[0].shuffle(ROWS, seed=0).batch(BATCH), data[1].batch(BATCH)
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((12, 12, 1)),
            layers.Conv2D(8, 3, activation="relu"),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(4),
        ]
    )
    # The loss that `fit` reports is a sum in float32, which differs by some 2e-7 from the mean of the batches' losses.
    exact = keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="exact", dtype="float64")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(), loss, metrics=["accuracy", exact])
    rates = keras.callbacks.LearningRateScheduler(lambda epoch: 0.004 / 2**epoch)
    # Without steps_per_epoch, `fit` begins the data twice between two epochs, and so uses every second order of a shuffle.
    how = {"steps_per_epoch": len(train), "callbacks": [rates], "verbose": 0}
    history = model.fit(train, validation_data=test, epochs=EPOCHS, **how).history
    figures = [{name: history[theirs][epoch] for name, theirs in NAMES.items()} for epoch in range(EPOCHS)]
    return figures, model.get_weights()


@pytest.fixture
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Let Keras compute in this type, here and on the workers."""
    import keras

    program, named = import_module("examples.programs.keras_convnet"), request.param
    create = program.model_creator

    def use(name: str) -> None:
        keras.config.set_floatx(name)
        keras.config.set_dtype_policy(name)

    def creator(config: dict[str, Any]) -> Any:
        use(named)
        return create(config)

    monkeypatch.setattr(program, "model_creator", creator)
    use(named)
    yield named
    use("float32")


def figures_equal(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    assert len(ours) == EPOCHS
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, rel=2e-7, abs=0)


@pytest.mark.parametrize("dtype", ["float32"], indirect=True)
def test_one_worker_equals_fit(dtype: str) -> None:
    figures, model = import_module("examples.programs.keras_convnet").main(ARGUMENTS)
    expected, weights = by_fit()
    figures_equal(figures, expected)
    for mine, other in zip(model.get_weights(), weights, strict=True):
        assert mine.dtype == other.dtype == dtype and np.array_equal(mine, other)


@pytest.mark.more
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64"], indirect=True)
def test_two_workers_equal_fit(ray_cluster: None, dtype: str) -> None:
    figures, model = import_module("examples.programs.keras_convnet").main([*ARGUMENTS, "--workers", "2"])
    expected, weights = by_fit()
    figures_equal(figures, expected)
    for mine, other in zip(model.get_weights(), weights, strict=True):
        assert mine.dtype == other.dtype == dtype
        np.testing.assert_allclose(mine, other, rtol=2e-7, atol=0)


def dying(folder: Path) -> Any:
    """Return a callback that kills one of the workers in the middle of the second epoch."""
    import keras

    class Dies(keras.callbacks.Callback):  # type: ignore[misc]
        epoch = 0

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if (self.epoch, batch) == (1, 2):
                try:
                    os.close(os.open(folder / "killed", os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    return
                os.kill(os.getpid(), signal.SIGKILL)

    return Dies()


class Room:
    """An actor that needs processors, and does nothing."""


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.elastic
@pytest.mark.parametrize("dtype", ["float64"], indirect=True)
def test_a_worker_that_is_not_replaced_changes_nothing(ray_cluster: None, dtype: str, tmp_path: Path) -> None:
    import keras
    import ray

    from raysgd import ElasticConfig
    from raysgd.tf import TFTrainer

    program = import_module("examples.programs.keras_convnet")
    halving = keras.callbacks.LearningRateScheduler(lambda epoch: 0.004 / 2**epoch)
    found = []
    for callbacks in ([halving, dying(tmp_path)], [halving]):
        config = {"rows": ROWS, "fit_config": {"callbacks": callbacks, "batch_size": BATCH}}
        with TFTrainer(
            program.model_creator,
            program.data_creator,
            config,
            num_replicas=2,
            elastic=ElasticConfig(grow=False),
            num_cpus_per_worker=3,  # of 8 in the cluster
        ) as trainer:
            results = [{**trainer.train(), **trainer.validate()}]
            # All workers of a generation are new processes. This takes the room of the killed one as soon as it is free.
            taken = [ray.remote(num_cpus=4)(Room).remote()] if len(callbacks) > 1 else []
            results += [{**trainer.train(), **trainer.validate()} for _ in range(EPOCHS - 1)]
            assert trainer.world_size == 3 - len(callbacks) and trainer.batch_mode == "global"
            rates = trainer.apply_all_operators(lambda operator: float(operator.optimizer.learning_rate))
            found.append((trainer.get_model().get_weights(), results, rates[0]))
        for each in taken:
            ray.kill(each)
    assert (tmp_path / "killed").exists()
    (mine, ours, rate), (theirs, expected, planned) = found
    assert rate == planned
    for one, other in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-7, atol=0)
    # Without what the failed worker had measured in the second epoch, which is lost.
    names = ("validation_loss", "validation_accuracy", "num_samples")
    for one, other in zip(ours, expected, strict=True):
        assert {name: one[name] for name in names} == pytest.approx({name: other[name] for name in names}, rel=2e-7)
