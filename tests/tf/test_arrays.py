"""TFTrainer takes arrays, `batch_size`, `validation_split` and `shuffle` as Keras' `fit` takes them."""

from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

import keras  # noqa: E402

from raysgd.errors import ConfigError  # noqa: E402
from raysgd.tf import TFTrainer  # noqa: E402
from tests.replicas import tf_rank  # noqa: E402
from tests.tf.small import ROWS, Small, make_data, model_creator  # noqa: E402

SPLIT = 0.29  # of 101 rows: 71.71 are left, so 71 are trained on, and 30 validated
TRAINED = 71


def trained(data: Any, config: dict[str, Any], epochs: int = 2, **fit: Any) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Return the results of the last epoch and of a validation, and the weights."""
    with TFTrainer(model_creator, lambda config: data, {**config, "fit_config": fit}) as trainer:
        for _ in range(epochs):
            result = trainer.train()
        return {**result, **trainer.validate()}, trainer.get_model().get_weights()


def test_equal_to_fit() -> None:
    features, labels = make_data()
    weights = np.linspace(0.5, 2, ROWS).astype("float32")
    how = {"batch_size": 16, "validation_split": SPLIT, "shuffle": False}
    model = model_creator({})
    history = model.fit(features, labels, sample_weight=weights, epochs=2, verbose=0, **how).history
    found, mine = trained(((features, labels, weights), None), {}, **how)
    for expected, got in zip(model.get_weights(), mine, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6)
    assert found["train_accuracy"] == pytest.approx(history["accuracy"][-1])
    assert found["validation_accuracy"] == pytest.approx(history["val_accuracy"][-1])
    assert found["num_samples"] == ROWS - TRAINED


def test_the_order_of_a_shuffle_is_that_of_a_data_set() -> None:
    data = tf.data.Dataset.from_tensor_slices(make_data()).shuffle(ROWS, seed=0).batch(32)
    model = model_creator({})
    model.fit(
        data, epochs=2, steps_per_epoch=4, verbose=0
    )  # without it, `fit` begins the data twice for the second epoch
    _, mine = trained((make_data(), make_data()), {})
    for expected, got in zip(model.get_weights(), mine, strict=True):
        assert np.array_equal(got, expected)
    unshuffled, _ = trained((make_data(), make_data()), {}, shuffle=False)
    assert unshuffled["num_samples"] == ROWS


class Noting(Small):
    """Notes the numbers of the rows that it gets."""

    def setup(self, config: dict[str, Any]) -> None:
        super().setup(config)
        self.seen: list[list[int]] = []
        features, labels = make_data()
        numbered = np.concatenate([np.arange(ROWS, dtype="float32")[:, None], features[:, 1:]], axis=1)
        self.register_data(
            train_dataset=(numbered, labels),
            batch_size=8,
            validation_dataset={"first": (features[:30], labels[:30]), "rest": (features[30:], labels[30:])},
        )

    def train_batch(self, batch: Any, batch_info: dict[str, Any]) -> dict[str, Any]:
        self.seen.append([int(number) for number in batch[0][:, 0]])
        return super().train_batch(batch, batch_info)


def test_a_new_process_continues_in_the_shuffled_order() -> None:
    whole, first, new = (tf_rank(Noting) for _ in range(3))
    for _ in range(2):
        whole.train(1)
        whole.train(2)
    first.train(1)
    first.train(2, num_steps=5)
    new.load(first.state())
    new.train(3)
    orders = [each.replica.operator.seen for each in (whole, first, new)]
    assert orders[1] + orders[2] == orders[0][:26]
    for epoch in (orders[0][:13], orders[0][13:26]):
        assert sorted(number for batch in epoch for number in batch) == list(range(ROWS))
    assert orders[0][:13] != orders[0][13:26]


def test_validation_data_with_names() -> None:
    with TFTrainer(training_operator_cls=Noting, config={}) as trainer:
        found = trainer.validate()
        features, labels = make_data()
        model, loss = trainer.get_model(), trainer.get_local_operator().criterion
        for name, part in (("first", slice(30)), ("rest", slice(30, None))):
            output = model(features[part])
            right = float(np.mean(np.argmax(output, axis=1) == labels[part]))
            assert found[f"val_{name}_loss"] == pytest.approx(float(loss(labels[part], output)), rel=1e-5)
            assert found[f"val_{name}_hits"] == pytest.approx(right)
        assert found["num_samples"] == ROWS and found["batch_count"] == 4 + 9


@pytest.mark.parametrize("kind", ["dict", "list"])
def test_several_inputs_equal_fit(kind: str) -> None:
    features, labels = make_data()
    named = {"a": features[:, :3], "b": features[:, 3:]}
    inputs: Any = named if kind == "dict" else list(named.values())

    def creator(config: dict[str, Any]) -> Any:
        keras.utils.set_random_seed(3)
        given = {name: keras.Input((part.shape[1],), name=name) for name, part in named.items()}
        output = keras.layers.Dense(3)(keras.layers.Concatenate()(list(given.values())))
        model = keras.Model(given if kind == "dict" else list(given.values()), output)
        model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    expected = creator({})
    expected.fit(inputs, labels, shuffle=False, verbose=0)  # batches of 32
    config = {"fit_config": {"shuffle": False}}
    with TFTrainer(creator, lambda config: ((inputs, labels), None), config) as trainer:
        assert trainer.train()["num_samples"] == ROWS
        for one, other in zip(trainer.get_model().get_weights(), expected.get_weights(), strict=True):
            assert np.array_equal(one, other)


x, y = make_data()
DATA = tf.data.Dataset.from_tensor_slices((x, y)).batch(10)


@pytest.mark.parametrize(
    ("data", "fit", "says"),
    [
        ((x, y), {}, r"for arrays \(\(x, y\), \(x, y\)\), or"),
        (((x, y[:-1]), None), {}, r"same number of rows, got 2 with the shapes \(101, 8\), \(100,\)"),
        (((x, [1, 2]), None), {}, r"same number of rows, got 3|the shapes \(101, 8\), \(\), \(\)"),
        (((x, y, y, y), None), {}, "got 4 with the shapes"),
        (((x[:0], y[:0]), None), {}, "same number of rows"),
        (((x, y), DATA), {"validation_split": 0.5}, "and no validation_dataset"),
        ((DATA, None), {"validation_split": 0.5}, "pass arrays"),
        (((x, y), None), {"validation_split": 0.999}, "leave rows for both parts, got 0.999 for 101 rows"),
        (((x, y), None), {"validation_split": 1.5}, "must lie between 0 and 1"),
        (((x, y), None), {"batch_size": 0}, "batch_size must be a whole number of at least 1"),
        ((DATA, DATA), {"batch_size": 5}, "batch_size and shuffle are for arrays"),
    ],
)
def test_what_does_not_fit_is_refused(data: Any, fit: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        trained(data, {}, epochs=1, **fit)
