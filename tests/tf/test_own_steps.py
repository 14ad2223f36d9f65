"""Keras models with a train_step or test_step of their own: the weights and the results are those of Keras' fit and evaluate."""

import copy
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

import keras  # noqa: E402

from raysgd import ElasticConfig  # noqa: E402
from raysgd.errors import ConfigError  # noqa: E402
from raysgd.tf import TFTrainer  # noqa: E402
from raysgd.tf.own_steps import average_applied  # noqa: E402
from tests.tf.own_models import data_creator, model_creator  # noqa: E402
from tests.tf.small import ROWS, arrays, fire  # noqa: E402


def trainer_of(model: str, **given: Any) -> TFTrainer:
    config = {"model": model, **given.pop("config", {})}
    return TFTrainer(model_creator, data_creator, config, **given)


@pytest.mark.parametrize("model", ["tracked", "gan", "eager", "penalized"])
def test_one_worker_does_what_fit_does(model: str) -> None:
    config = {"model": model}
    train, test = data_creator(config)
    theirs = model_creator(config)
    history = theirs.fit(train, epochs=2, verbose=0).history
    with trainer_of(model) as trainer:
        first, second = trainer.train(), trainer.train()
        mine = trainer.get_model()
        for expected, got in zip(theirs.get_weights(), mine.get_weights(), strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-5)
        for name, (one, other) in history.items():
            assert first[f"train_{name}"] == pytest.approx(one, rel=1e-3, abs=1e-5)
            assert second[f"train_{name}"] == pytest.approx(other, rel=1e-3, abs=1e-5)
        assert {name for name in first if name.startswith("train_")} == {f"train_{name}" for name in history}
        assert (first["num_samples"], first["batch_count"]) == (ROWS, 6)
        if model != "gan":  # Keras has no test step for a model without a call
            expected = theirs.evaluate(test, verbose=0, return_dict=True)
            result = trainer.validate()
            for name, value in expected.items():
                assert result[f"validation_{name}"] == pytest.approx(value, rel=1e-3, abs=1e-5)


def test_a_checkpoint_has_all_optimizers(tmp_path: Path) -> None:
    with trainer_of("gan") as trainer:
        trainer.train()
        path = trainer.save(tmp_path / "gan.ckpt")
        trainer.train()
        expected = trainer.state_dict()
    with trainer_of("gan") as trainer:
        trainer.load(path)
        trainer.train()
        state = trainer.state_dict()
    assert len(state["optimizers"]) == 3, "the one that Keras compiles by default is among them"
    for got, wanted in zip(arrays(state), arrays(expected), strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-6)


def test_a_model_that_runs_eagerly_has_the_variables_of_all_optimizers_from_the_start(tmp_path: Path) -> None:
    def built(config: dict[str, Any]) -> Any:
        model = model_creator(config)
        model.to_make.build(model.maker.trainable_variables)
        model.to_judge.build(model.judge.trainable_variables)
        return model

    with pytest.raises(
        ConfigError, match=r"Gan has optimizers without variables: SGD, Adam\. A new .*build\(variables\)"
    ):
        trainer_of("eager gan")
    config = {"model": "eager gan"}
    with TFTrainer(built, data_creator, config) as trainer:
        trainer.train()
        path, state = trainer.save(tmp_path / "gan.ckpt"), trainer.state_dict()
    with TFTrainer(built, data_creator, config) as trainer:
        trainer.load(path)
        assert all(map(np.array_equal, arrays(trainer.state_dict()), arrays(state)))


def test_class_weights_reach_the_models_own_step() -> None:
    weights = {0: 0.5, 1: 1.0, 2: 4.0}
    config = {"model": "penalized"}
    theirs = model_creator(config)
    theirs.fit(data_creator(config)[0], epochs=1, verbose=0, class_weight=weights)
    with trainer_of("penalized", config={"fit_config": {"class_weight": weights}}) as trainer:
        trainer.train()
        for expected, got in zip(theirs.get_weights(), trainer.get_model().get_weights(), strict=True):
            np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.more
@pytest.mark.parametrize("model", ["tracked", "gan"])
def test_two_workers_train_as_one(ray_cluster: None, model: str) -> None:
    with trainer_of(model) as trainer:
        expected = [trainer.train(), trainer.train()]
        if model == "tracked":
            expected.append(trainer.validate())
        weights = copy.deepcopy(trainer.get_model().get_weights())
    with trainer_of(model, num_replicas=2) as trainer:
        results = [trainer.train(), trainer.train()]
        if model == "tracked":
            results.append(trainer.validate())
        mine = trainer.get_model().get_weights()
    for got, wanted in zip(mine, weights, strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-6)
    for result, wanted in zip(results, expected, strict=True):
        assert result["num_samples"] == wanted["num_samples"] == ROWS
        names = [name for name in wanted if name.startswith(("train_", "validation_"))]
        assert {name for name in result if name.startswith(("train_", "validation_"))} == set(names) != set()
        for name in names:
            assert result[name] == pytest.approx(wanted[name], rel=1e-4), name


def test_a_step_whose_gradients_do_not_arrive_is_not_counted() -> None:
    optimizer, variable = keras.optimizers.Adam(0.1), keras.Variable(1.0)
    optimizer.build([variable])

    def late() -> Any:
        time.sleep(0.3)
        raise RuntimeError("a peer failed")

    average_applied(optimizer, lambda found: [tf.ensure_shape(tf.py_function(late, [], tf.float32), ())])
    with pytest.raises(tf.errors.OpError, match="a peer failed"):
        tf.function(lambda: optimizer.apply([tf.constant(1.0)], [variable]))()
    assert (int(optimizer.iterations), float(variable)) == (0, 1.0)


class Dies(keras.callbacks.Callback):  # type: ignore[misc]
    """Kills a worker, once, before the ninth step. The other one is waiting for its gradients then."""

    def __init__(self, marks: Path) -> None:
        super().__init__()
        self.marks = marks

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if int(self.model.optimizer.iterations) == 8:
            fire("kill", str(self.marks))


@pytest.mark.slow
@pytest.mark.more
@pytest.mark.elastic
def test_a_worker_failure_loses_no_own_step(ray_cluster: None, tmp_path: Path) -> None:
    with trainer_of("tracked") as trainer:
        for _ in range(2):
            trainer.train()
        weights = trainer.get_model().get_weights()
    both, config = ElasticConfig(min_workers=2), {"fit_config": {"callbacks": [Dies(tmp_path)]}}
    with trainer_of("tracked", config=config, num_replicas=2, elastic=both) as trainer:
        for _ in range(2):
            result = trainer.train()
        (recovery,) = trainer.recoveries
        mine = trainer.get_model()
    assert (recovery.reason, recovery.epoch, recovery.batch) == ("worker death", 2, 2)
    assert (int(mine.optimizer.iterations), result["num_samples"]) == (12, ROWS)
    for got, wanted in zip(mine.get_weights(), weights, strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-6)


@pytest.mark.slow
def test_gradients_that_cannot_be_averaged_are_refused(ray_cluster: None) -> None:
    with (
        trainer_of("hidden", num_replicas=2) as trainer,
        pytest.raises(ConfigError, match=r"Hidden.train_step changes the weights differently on each worker"),
    ):
        trainer.train()
