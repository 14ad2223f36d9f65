"""`seed=` and `total_steps()` of a TFTrainer, in this process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")

from raysgd import TFTrainer  # noqa: E402
from raysgd.errors import ConfigError  # noqa: E402
from raysgd.tf import TrainingOperator  # noqa: E402
from tests.replicas import tf_rank  # noqa: E402
from tests.tf.small import arrays  # noqa: E402


class Dropping(TrainingOperator):
    """Shuffles, adds noise of NumPy to its data, and has a layer that draws random numbers."""

    def setup(self, config: dict[str, Any]) -> None:
        model = keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(4), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
        )
        self.model, self.optimizer, self.criterion = self.register(
            models=model, optimizers=keras.optimizers.SGD(0.1), criterion=keras.losses.MeanSquaredError()
        )

        def noisy() -> Any:
            for _ in range(12):
                yield np.random.rand(2), np.random.rand(1)

        spec = (tf.TensorSpec((2,), tf.float64), tf.TensorSpec((1,), tf.float64))
        data = tf.data.Dataset.from_generator(noisy, output_signature=spec)
        self.register_data(train_dataset=data.shuffle(12).batch(4), validation_dataset=data.batch(4))
        self.planned = self.total_steps(config["epochs"], config.get("num_steps")) if "epochs" in config else None


def trained(
    seed: int, *, save: Path | None = None, load: Path | None = None, validate: bool = True
) -> list[np.ndarray]:
    """Train two epochs, or the second one if there is a file to load. Return the state's numbers after each."""
    found = []
    with TFTrainer(training_operator_cls=Dropping, seed=seed) as trainer:
        if load is not None:
            trainer.load(load)
        for _ in range(2 if load is None else 1):
            trainer.train()
            if validate:
                trainer.validate()
            if save is not None and not save.exists():
                trainer.save(save)
            found.append(np.concatenate([array.ravel() for array in arrays(trainer.state_dict())]))
    return found


def test_two_runs_end_with_the_same_bits_also_after_a_load(tmp_path: Path) -> None:
    path = tmp_path / "half.ckpt"
    first, second = trained(7, save=path), trained(7)
    assert all(map(np.array_equal, first, second))
    assert np.array_equal(trained(7, load=path)[0], first[1])
    assert not np.array_equal(trained(8, load=path)[0], first[1])


def test_the_layers_of_each_rank_draw_their_own_numbers() -> None:
    found = []
    for rank in range(2):
        one = tf_rank(Dropping, {}, rank, num_workers=2, seed=7)
        one.train(1, 1)
        found.append(one.operator.model.layers[1](np.ones((16, 4)), training=True).numpy().tolist())
    assert found[0] != found[1]


def test_a_load_in_mid_epoch_continues_with_the_same_numbers(tmp_path: Path) -> None:
    with TFTrainer(training_operator_cls=Dropping, seed=7) as trainer:
        trainer.train(num_steps=1)
        trainer.save(tmp_path / "half.ckpt")
    np.random.seed(1)
    with TFTrainer(training_operator_cls=Dropping, seed=7) as trainer:
        trainer.load(tmp_path / "half.ckpt")
        for _ in range(2):
            trainer.train()
        found = np.concatenate([array.ravel() for array in arrays(trainer.state_dict())])
    assert np.array_equal(found, trained(7, validate=False)[-1])


def test_the_number_of_steps_needs_data_of_a_known_length() -> None:
    with pytest.raises(ConfigError, match="no length that is known in advance"):
        TFTrainer(training_operator_cls=Dropping, config={"epochs": 2})
    with TFTrainer(training_operator_cls=Dropping, config={"epochs": 2, "num_steps": 3}) as trainer:
        assert trainer.get_local_operator().planned == 6

    class Known(Dropping):
        def register_data(self, *, train_dataset: Any = None, validation_dataset: Any = None) -> None:
            data = train_dataset.apply(tf.data.experimental.assert_cardinality(3))
            super().register_data(train_dataset=data, validation_dataset=validation_dataset)

    with TFTrainer(training_operator_cls=Known, config={"epochs": 2}) as trainer:
        operator = trainer.get_local_operator()
        for _ in trainer.epochs(2):
            trainer.train()
        assert operator.planned == 6 == int(operator.optimizer.iterations)


@pytest.mark.parametrize("seed", [None, 7])
def test_each_prediction_draws_other_numbers_which_a_seed_decides(seed: int | None) -> None:
    class MonteCarlo(Dropping):
        def predict_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
            return self.model(batch, training=True)

    def predicted() -> list[np.ndarray]:
        with TFTrainer(training_operator_cls=MonteCarlo, seed=seed) as trainer:
            return [trainer.predict(np.ones((12, 2))) for _ in range(2)]

    (first, second), again = predicted(), predicted()
    assert not np.array_equal(first, second)
    if seed is not None:
        assert np.array_equal(first, again[0]) and np.array_equal(second, again[1])
