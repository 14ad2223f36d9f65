"""`predict` and `test` of a TFTrainer, in this process."""

from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from raysgd import TFTrainer  # noqa: E402
from raysgd.errors import ConfigError  # noqa: E402
from tests.tf.small import ROWS, Small, data_creator, make_data, model_creator  # noqa: E402

X, Y = make_data()


class HeldOut(Small):
    def register_data(self, **data: Any) -> None:
        held_out = tf.data.Dataset.from_tensor_slices((X[:30], Y[:30])).batch(8)
        super().register_data(**data, test_dataset=held_out)


def test_outputs_are_in_the_order_of_the_data_and_a_test_has_its_own() -> None:
    with TFTrainer(training_operator_cls=HeldOut) as trainer:
        trainer.train(num_steps=3)
        expected = trainer.get_model().predict(X, verbose=0)
        batches = tf.data.Dataset.from_tensor_slices((X, Y)).batch(7)
        for data in (X, (X, Y), tf.constant(X), batches, batches.map(lambda x, y: x)):
            found = trainer.predict(data, batch_size=9)
            assert isinstance(found, np.ndarray) and found.shape == (ROWS, 3)
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        tested, validated = trainer.test(), trainer.validate()
        assert (tested["num_samples"], validated["num_samples"]) == (30, ROWS)
        assert {name.replace("test_", "val_") for name in tested} == set(validated) and "test_hits" in tested
        assert tested["test_hits"] == pytest.approx((expected[:30].argmax(1) == Y[:30]).mean())
        assert trainer.test() == tested and len(trainer.history) == 4


def test_a_compiled_model_predicts_with_its_own_step() -> None:
    with TFTrainer(model_creator, data_creator) as trainer:
        expected = trainer.get_model().predict(X, verbose=0)
        np.testing.assert_allclose(trainer.predict(X, batch_size=50), expected, rtol=1e-5, atol=1e-6)
        with pytest.raises(ConfigError, match=r"test\(\) needs data: call self.register_data\(test_dataset=...\)"):
            trainer.test()


def test_containers_are_joined_and_other_outputs_and_data_are_refused() -> None:
    class Detailed(Small):
        def predict_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
            return {"twice": 2 * batch, "batch": tf.fill([len(batch)], batch_info["batch_idx"])}

    class Wrong(Small):
        def predict_batch(self, batch: Any, batch_info: dict[str, Any]) -> Any:
            return tf.reduce_sum(batch)

    with TFTrainer(training_operator_cls=Detailed) as trainer:
        found = trainer.predict(X[:5], batch_size=2)
        assert np.array_equal(found["twice"], 2 * X[:5]) and found["batch"].tolist() == [0, 0, 1, 1, 2]
        slices = tf.data.Dataset.from_tensor_slices
        cases: list[tuple[Any, str]] = [
            (slices(X).batch(5).repeat(), "a data set without an end"),
            (slices(Y), r"got one of single samples: call .batch\(n\) on it"),
            ((X, Y[:3]), "needs arrays with the same number of rows"),
            (3.0, "needs arrays with the same number of rows"),
            (X[:0], "data without a sample"),
        ]
        for data, message in cases:
            with pytest.raises(ConfigError, match=message):
                trainer.predict(data)
        with pytest.raises(ConfigError, match="batch_size must be a whole number of at least 1, got 0"):
            trainer.predict(X, batch_size=0)
    with (
        TFTrainer(training_operator_cls=Wrong) as trainer,
        pytest.raises(TypeError, match="predict_batch must return a tensor with a row for each"),
    ):
        trainer.predict(X)
